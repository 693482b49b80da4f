"""Whether stores write each element of a buffer once, alone or joined with those of other steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ..ir.facts import covers
from ..ir.index import Val
from ..ir.nodes import Size
from .access import Access, Box, show, vars_of, volume


def covered(
    name: str, shape: tuple[Size, ...], writes: list[Access], before: str, fail: Callable[[str], NoReturn]
) -> str | None:
    """None if the stores write each element once; else a note of the boxes written so far (joined with those in `before`)."""
    if len(writes) == 1 and not writes[0].guarded:
        w = writes[0]
        if covers(w.index, shape, w.loops):
            return None
    known = [b.split(" x ") for b in before.split("; ")] if before else []
    found: list[Box] = [tuple((int(lo), int(hi)) for lo, hi in (side.split(":") for side in b)) for b in known]
    for w in writes:
        box = _box(w, shape)
        if box is None:
            fail(
                f"buffer {name!r} is stored at [{show(w.index)}] in phase {w.phase}, which is not proven to write each element once"
            )
        if any(all(lo < hi2 and lo2 < hi for (lo, hi), (lo2, hi2) in zip(box, other, strict=True)) for other in found):
            fail(f"buffer {name!r} is stored twice in a part of it, by phase {w.phase} at [{show(w.index)}]")
        found.append(box)
    if sum(volume(b) for b in found) == volume(tuple((0, n) for n in shape if isinstance(n, int))):
        return None
    return "; ".join(" x ".join(f"{lo}:{hi}" for lo, hi in b) for b in found)


def _box(w: Access, shape: tuple[Size, ...]) -> Box | None:
    """The box that a store of the form [i + a, j + b, …] fills."""
    loops = {v for v in w.loops if v.extent != 1}
    sides: list[tuple[int, int]] = []
    for e, n in zip(w.index, shape, strict=True):
        mine = vars_of(e)
        if w.guarded or not isinstance(n, int) or not mine <= loops or any(isinstance(a, Val) for a in e.atoms()):
            return None
        loops -= mine
        if not mine:
            if not e.is_const:
                return None
            sides.append((int(e), int(e) + 1))
            continue
        start = e.subst(dict.fromkeys(mine, 0))
        extent = 1
        for v in mine:
            if not isinstance(v.extent, int):
                return None
            extent *= v.extent
        if not start.is_const or not covers((e - start,), (extent,), tuple(mine)):
            return None
        sides.append((int(start), int(start) + extent))
    return None if loops else tuple(sides)
