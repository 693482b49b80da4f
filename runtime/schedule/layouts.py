"""How values inside of a graph lie in memory on a GPU: as what they are computed from, so that a kernel reads and writes neighbours.

Nobody sees the strides of such a value. A channels-last tensor's padded copy, the windows' greatest elements or an indexed update of zeros
would else be row-major, and each kernel that makes or reads them would go across memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..ir.index import Expr, Var, product
from ..ir.nodes import Buffer, Extern, Nest, Node, Program, Size, contiguous_strides
from .memory import flat_index

LARGE = 1 << 16  # elements of a value that is worth it


def followed(
    program: Program, items: Iterable[Nest | Extern], wanted: Mapping[str, tuple[Size, ...]]
) -> dict[str, tuple[Size, ...]]:
    """Strides of large values whose operands are not laid out row-major. `wanted`: strides that are asked of some from outside."""
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
        if free(it) and (like := _like(it, known)) is not None:
            base = None if it.scatter is None else fresh.get(it.scatter.base)
            if it.scatter is None:
                found[it.name] = stride = like
            elif base is not None and free(base) and base.scatter is None and readers[base.name] == 1:
                found[base.name] = found[it.name] = stride = like
        known[it.name] = Buffer(it.name, it.shape, it.dtype, stride)
    return found


def _like(nest: Nest, known: Mapping[str, Buffer]) -> tuple[int, ...] | None:
    """Strides of a dense layout with its dimensions in the order that the largest operand has in memory; None: row-major."""
    shape = [n for n in nest.shape if isinstance(n, int)]
    if len(shape) < len(nest.shape) or product(nest.shape) < LARGE:  # type: ignore[operator]
        return None
    places = nest.vars if nest.scatter is None else nest.scatter.index
    loops = {v for v in (nest.loop_vars if nest.scatter is None else nest.scatter.domain) if v.extent != 1}
    best: Mapping[Var, int] | None = None
    most = 0
    for ld in nest.body.loads():
        size = product(known[ld.attr.buffer].shape) if ld.attr.buffer in known else 0
        if isinstance(size, int) and size > most and (steps := _steps(ld, known[ld.attr.buffer], loops)) is not None:
            best, most = steps, size
    if best is None:
        return None
    far = _distances(places, shape, best)
    if far is None:
        return None
    order = sorted(range(len(shape)), key=far.__getitem__, reverse=True)
    if [k for k in order if shape[k] > 1] == [k for k in range(len(shape)) if shape[k] > 1]:
        return None
    strides, step = [1] * len(shape), 1
    for k in reversed(order):
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


__all__ = ["followed"]
