"""Predicted peak memory of a choice: both halves run node by node, a value is freed after its last reader, a view is its base."""

from __future__ import annotations

from collections.abc import Iterable

from .classes import OpClass
from .cut import Choice
from .facts import Facts
from .order import backward_order, forward_order

#: Values that one value in registers may stand for.
JOINED = 8


def peak_bytes(f: Facts, choice: Choice, *, fused: bool = False) -> int:
    """Greatest number of bytes alive at once, beside the inputs, over forward and backward. Sizes by their hints.

    Node by node every value is counted. `fused`: a pointwise value with one reader that is not heavy stays in registers; what it was made of
    is kept until that reader runs. A compiler does something in between, so this compares choices; it does not foretell an allocator's number.
    """
    outputs = {f.root[o] for o in f.outputs if o is not None}
    given = outputs | set(f.primals) | set(f.tangents)
    kept = {v if f.raw[f.root[v]] else f.root[v] for v in choice.saved if f.tensor[v]} - given
    base = sum(f.size[v] for v in outputs if f.tensor[v] and f.kind[v] is not OpClass.INPUT)
    forward = _run(f, forward_order(f, choice), held=kept | outputs, given=set(f.primals), alive=0, fused=fused)
    gradients = {f.root[g] for g in f.gradients if g is not None}
    alive = base + sum(f.size[v] for v in kept)
    backward = _run(f, backward_order(f, choice), held=gradients, given=given, alive=alive, start=kept, fused=fused)
    return max(forward, backward)


def _run(
    f: Facts,
    order: list[int],
    *,
    held: set[int],
    given: set[int],
    alive: int,
    start: Iterable[int] = (),
    fused: bool = False,
) -> int:
    """Peak while `order` runs. `held` is not freed, `given` is not counted, `start` is alive (and counted in `alive`) at the beginning."""
    present = set(start)
    joined = _in_registers(f, order, held | given | present) if fused else {}
    last: dict[int, int] = {}
    for step, v in enumerate(order):
        for u in (v, *f.inputs[v]):
            for root in joined.get(f.root[u], (f.root[u],)):
                last[root] = step
    for v in sorted(present - set(last) - held):
        alive -= f.size[v]
    ending: list[list[int]] = [[] for _ in order]
    for v, step in last.items():
        if v not in held and v not in given and f.tensor[v]:
            ending[step].append(v)
    most = alive
    for step, v in enumerate(order):
        root = f.root[v]
        if root not in present and root not in given and f.tensor[root] and root not in joined:
            present.add(root)
            alive += f.size[root]
            most = max(most, alive)
        for u in ending[step]:
            if u in present:
                alive -= f.size[u]
    return most


def _in_registers(f: Facts, order: list[int], stored: set[int]) -> dict[int, tuple[int, ...]]:
    """Values that are never in memory, each with the values in memory that it is made of."""
    here = set(order)
    out: dict[int, tuple[int, ...]] = {}
    for v in order:
        if f.kind[v] is not OpClass.POINTWISE or v in stored or not f.tensor[v]:
            continue
        readers: list[int] = []
        views = [v]
        while views:
            for u in f.users[views.pop()]:
                if u in here:
                    (views if f.kind[u] is OpClass.VIEW else readers).append(u)
        if len(readers) != 1 or f.kind[readers[0]] >= OpClass.HEAVY:
            continue
        made_of = dict.fromkeys(r for u in f.inputs[v] if f.tensor[u] for r in out.get(f.root[u], (f.root[u],)))
        if len(made_of) <= JOINED:
            out[v] = tuple(made_of)
    return out
