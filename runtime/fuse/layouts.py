"""Layout propagation on a GPU: values inside of a graph get the layout of what they are computed from, so that a kernel reads and writes neighbours.

Nothing outside of the graph sees the strides of such a value. Otherwise a padded copy of a channels-last tensor, the maxima of its windows or
an indexed update of zeros would be row-major, and each kernel that makes or reads them would go across memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ..ir.index import Expr, Var, product
from ..ir.nodes import Buffer, Extern, Nest, Node, Program, Size, contiguous_strides
from ..kernels.steps import flat_index


def propagated_strides(
    program: Program, items: Iterable[Nest | Extern], wanted: Mapping[str, tuple[Size, ...]], large: int
) -> dict[str, tuple[Size, ...]]:
    """Strides of values of `large` elements or more whose operands are not row-major. `wanted`: strides that some must have."""
    known: dict[str, Buffer] = {}
    found: dict[str, tuple[Size, ...]] = {}
    readers: dict[str, int] = {}
    items = list(items)
    for it in items:
        for name in it.reads():
            readers[name] = readers.get(name, 0) + 1
    fresh = {it.name: it for it in items if isinstance(it, Nest)}

    def free(nest: Nest) -> bool:
        return nest.name not in wanted and nest.stride is None and nest.scan is None

    for b in program.inputs:
        known[b.name] = b
    for it in items:
        if isinstance(it, Extern):
            known.update((b.name, b) for b in it.outs)
            continue
        stride = wanted.get(it.name, it.stride)
        if free(it) and (like := _like(it, known, large)) is not None:
            base = None if it.scatter is None else fresh.get(it.scatter.base)
            if it.scatter is None:
                found[it.name] = stride = like
            elif base is not None and free(base) and base.scatter is None and readers[base.name] == 1:
                found[base.name] = found[it.name] = stride = like
        known[it.name] = Buffer(it.name, it.shape, it.dtype, stride)
    return found


def _like(nest: Nest, known: Mapping[str, Buffer], large: int) -> tuple[int, ...] | None:
    """Strides of a dense layout with its dimensions in the order that most operands have in memory; None: row-major, also where as many are."""
    shape = [n for n in nest.shape if isinstance(n, int)]
    if len(shape) < len(nest.shape) or product(nest.shape) < large:  # type: ignore[operator]
        return None
    places = nest.vars if nest.scatter is None else nest.scatter.index
    loops = {v for v in (nest.loop_vars if nest.scatter is None else nest.scatter.domain) if v.extent != 1}
    # Each operand that moves with all loops is met at as many points as any other.
    orders: dict[str, tuple[int, ...]] = {}
    for ld in nest.body.loads():
        buffer = known.get(ld.attr.buffer)
        if buffer is None or buffer.name in orders or (steps := _steps(ld, buffer, loops)) is None:
            continue
        if (far := _distances(places, shape, steps)) is not None:
            order = sorted(range(len(shape)), key=far.__getitem__, reverse=True)
            orders[buffer.name] = tuple(k for k in order if shape[k] > 1)
    row_major = tuple(k for k in range(len(shape)) if shape[k] > 1)
    votes = Counter(orders.values())
    best = max(votes, key=lambda order: (votes[order], order == row_major), default=row_major)
    if best == row_major:
        return None
    strides, step = [1] * len(shape), 1
    for k in reversed(best):
        strides[k] = step
        step *= shape[k]
    return tuple(strides)


def _steps(ld: Node, buffer: Buffer, loops: Iterable[Var]) -> dict[Var, int] | None:
    """How far apart in memory neighbours of each loop are, where the access moves with all of them."""
    stride = buffer.stride if buffer.stride is not None else contiguous_strides(buffer.shape)
    place = flat_index(ld.attr.index, Buffer(buffer.name, buffer.shape, buffer.dtype, stride))
    steps = {v: place.coefficient(v) for v in loops}
    if any(c is None or not c.is_const or not int(c) for c in steps.values()):
        return None
    return {v: abs(int(c)) for v, c in steps.items() if c is not None}


def _distances(places: Sequence[Expr], shape: Sequence[int], steps: Mapping[Var, int]) -> list[float] | None:
    """Of each dimension the step that the operand makes along it; one dimension whose place data brings has what is left."""
    left = dict(steps)
    far: list[float] = []
    for e in places:
        v = e.var
        far.append(left.pop(v, 0) if v is not None else -1)
    data = [k for k, e in enumerate(places) if far[k] < 0 and shape[k] > 1]
    if len(data) > 1 or (left and not data) or any(far[k] == 0 and n > 1 for k, n in enumerate(shape)):
        return None
    for k in data:
        if not left:
            return None
        far[k] = max(left.values())
    return far


__all__ = ["propagated_strides"]
