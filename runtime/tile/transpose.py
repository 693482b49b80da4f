"""Transpose tiles: pointwise kernels that access some buffers along one loop and some along another go through square tiles of both loops.

The inner dimension of a block runs along one loop, the outer dimension along the other: each access is contiguous in one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..ir.index import Atom, Expr, Var, of, product
from ..ir.nodes import ITEMSIZE, Buffer
from ..kernels.plan import Kernel, Phase, Reduce, Store
from ..kernels.steps import flat_index
from .scratch import changed, roots

SELDOM = 8  # an access at less than this part of the points does not count


def transpose_tiled(kernel: Kernel, layouts: Mapping[str, Buffer]) -> Kernel | None:
    """The kernel with a part of one loop as inner loop and another as the fastest outer one, or None if that gains nothing."""
    if kernel.serial or kernel.scratch or any(p.inner for p in kernel.phases):
        return None
    if any(not isinstance(st, Store) or st.mode != "set" or st.atomic for p in kernel.phases for st in p.body):
        return None
    if not all(isinstance(v.extent, int) for v in kernel.outer):
        return None
    least = kernel.gpu.budgets.least_edge
    weights: Counter[Var] = Counter()
    far: dict[Var, set[Var]] = {}  # for each loop: others along which what is contiguous along it makes large steps
    for name, place, met in _accesses(kernel, layouts):
        along = next((v for v in kernel.outer if place.coefficient(v) == 1), None)
        if along is None or met * SELDOM < product(v.extent for v in kernel.outer):  # type: ignore[operator]
            continue
        size = ITEMSIZE[layouts[name].dtype]
        weights[along] += met * size
        far.setdefault(along, set()).update(
            v
            for v in kernel.outer
            if (c := place.coefficient(v)) is not None and c.is_const and int(c) * size > kernel.gpu.limits.sector
        )
    sides = [v for v, _ in weights.most_common() if isinstance(v.extent, int) and v.extent >= least]
    for a in sides[:1]:
        for b in sides[1:]:
            part = next(
                (d for d in range(min(kernel.gpu.budgets.edge, int(a.extent)), 0, -1) if int(a.extent) % d == 0), 1
            )  # type: ignore[call-overload]
            if a in far[b] and b in far[a] and part >= least:
                return _tiled(kernel, a, b, part)
    return None


def _accesses(kernel: Kernel, layouts: Mapping[str, Buffer]) -> Iterator[tuple[str, Expr, int]]:
    """Each place that is read or written, and the number of points."""
    for phase in kernel.phases:
        for st in phase.body:
            assert not isinstance(st, Reduce)
            found = [(ld.attr.buffer, ld.attr.index) for root in roots(st) for ld in root.loads()]
            for name, index in dict.fromkeys([*found, (st.buffer, st.index)]):
                if name in layouts:
                    place = flat_index(index, layouts[name])
                    met = product(a.extent for a in place.atoms() if isinstance(a, Var))
                    assert isinstance(met, int)
                    yield name, place, met


def _tiled(kernel: Kernel, a: Var, b: Var, part: int) -> Kernel:
    assert isinstance(a.extent, int)
    many, inner = Var(f"{a.name}m", a.extent // part), Var(f"{a.name}p", part)
    mapping: dict[Atom, int | Expr] = {a: of(many) * part + of(inner)}
    outer = (*(v for v in kernel.outer if v not in (a, b)), many, b)
    phases = tuple(Phase((inner,), tuple(changed(st, mapping, lambda _: None) for st in p.body)) for p in kernel.phases)
    return replace(kernel, outer=tuple(v for v in outer if v.extent != 1), phases=phases)


__all__ = ["transpose_tiled"]
