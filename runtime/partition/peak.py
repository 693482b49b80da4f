"""Predicted peak memory of a choice: both halves run node by node, a value is freed after its last reader, a view is its base."""

from __future__ import annotations

from collections.abc import Iterable

from .classes import OpClass
from .cut import Choice
from .facts import Facts
from .order import backward_order, forward_order


def peak_bytes(f: Facts, choice: Choice) -> int:
    """Greatest number of bytes alive at once, beside the inputs, over forward and backward. Sizes by their hints.

    Values that a compiler would keep in registers are counted, so this compares choices; it does not foretell an allocator's number.
    """
    outputs = {f.root[o] for o in f.outputs if o is not None}
    given = outputs | set(f.primals) | set(f.tangents)
    kept = {v if f.raw[f.root[v]] else f.root[v] for v in choice.saved if f.tensor[v]} - given
    base = sum(f.size[v] for v in outputs if f.tensor[v] and f.kind[v] is not OpClass.INPUT)
    forward = _run(f, forward_order(f, choice), held=kept | outputs, given=set(f.primals), alive=0)
    gradients = {f.root[g] for g in f.gradients if g is not None}
    alive = base + sum(f.size[v] for v in kept)
    backward = _run(f, backward_order(f, choice), held=gradients, given=given, alive=alive, start=kept)
    return max(forward, backward)


def _run(f: Facts, order: list[int], *, held: set[int], given: set[int], alive: int, start: Iterable[int] = ()) -> int:
    """Peak while `order` runs. `held` is not freed, `given` is not counted, `start` is alive (and counted in `alive`) at the beginning."""
    last: dict[int, int] = {}
    for step, v in enumerate(order):
        for u in (v, *f.inputs[v]):
            last[f.root[u]] = step
    present = set(start)
    for v in sorted(present - set(last) - held):
        alive -= f.size[v]
    ending: list[list[int]] = [[] for _ in order]
    for v, step in last.items():
        if v not in held and v not in given and f.tensor[v]:
            ending[step].append(v)
    most = alive
    for step, v in enumerate(order):
        root = f.root[v]
        if root not in present and root not in given and f.tensor[root]:
            present.add(root)
            alive += f.size[root]
            most = max(most, alive)
        for u in ending[step]:
            if u in present:
                alive -= f.size[u]
    return most
