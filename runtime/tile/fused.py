"""Matrix products fused with their prologues and epilogues: their blocks, and which operands can be loaded by tensor descriptors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..fuse.products import Fused, fused_of
from ..ir.index import Expr, Var, of
from ..ir.nodes import ITEMSIZE, Buffer, Node
from ..kernels.calls import factors
from ..kernels.operands import count
from ..kernels.plan import Kernel, Tile
from ..kernels.steps import flat_index
from ..machine import Gpu


def fused_kernel(kernel: Kernel, layouts: Mapping[str, Buffer]) -> tuple[Fused, Tile]:
    """What a kernel with a tile computes, and how."""
    found = fused_of(kernel.parts, layouts, factors)
    assert found is not None, kernel.name
    assert kernel.tile is not None, kernel.name
    return found, kernel.tile


def points_of(found: Fused, tile: Tile) -> int:
    """Columns of all blocks of rows, in whole blocks: so many, divided by the columns of a block, are the programs."""
    return (
        count(found.batch)
        * blocks_along(found.row, tile.block_m)
        * blocks_along(found.column, tile.block_n)
        * tile.block_n
    )


def blocks_along(v: Var, size: int) -> int:
    return -(-count((v,)) // size)


@dataclass(frozen=True)
class Described:
    """An operand that lies in memory as a matrix: the buffer, where the batch begins, elements from one line to the next, and whether the
    steps of the sums are along its lines.
    """

    buffer: str
    start: Expr
    line: int
    along: bool


def described_operands(
    found: Fused, layouts: Mapping[str, Buffer], gpu: Gpu
) -> tuple[Described | None, Described | None]:
    """The left and the right operand, each None if tensor descriptors cannot load it: they need contiguous, vector-aligned lines."""
    return tuple(  # type: ignore[return-value]
        _described(found, v, n, {**layouts, **{b.name: b for b, _ in found.views}}, gpu)
        for v, n in ((found.row, found.left), (found.column, found.right))
    )


def are_odd(found: Fused, layouts: Mapping[str, Buffer], gpu: Gpu) -> bool:
    """Whether both operands lie in memory as matrices whose lines are not whole vectors apart."""
    known = {**layouts, **{b.name: b for b, _ in found.views}}
    for v, value in ((found.row, found.left), (found.column, found.right)):
        if (steps := _steps(found, v, value, known)) is None:
            return False
        across, along, _ = steps
        if 1 not in (across, along) or max(across, along) % (gpu.limits.vector // ITEMSIZE[value.dtype]) == 0:
            return False
    return True


def _steps(found: Fused, outer: Var, value: Node, layouts: Mapping[str, Buffer]) -> tuple[int, int, Expr] | None:
    """Of an operand in memory: elements from one row or column to the next, from one step of the sums to the next, and where a batch begins."""
    if value.op != "load" or value.args:
        return None
    where = flat_index(value.attr.index, layouts[value.attr.buffer])
    steps = [where.coefficient(v) for v in (outer, found.depth)]
    if any(s is None or not s.is_const for s in steps):
        return None
    across, along = (int(s) for s in steps if s is not None)
    start = where - of(outer) * across - of(found.depth) * along
    return None if {*start.atoms()} - {*found.batch} else (across, along, start)


def _described(found: Fused, outer: Var, value: Node, layouts: Mapping[str, Buffer], gpu: Gpu) -> Described | None:
    if (steps := _steps(found, outer, value, layouts)) is None:
        return None
    across, along, start = steps
    vector = gpu.limits.vector // ITEMSIZE[value.dtype]
    # Each term of where a batch begins is a multiple of a vector.
    if any(c % vector for _, c in start.terms):
        return None
    for inner, line, size, other in ((along, across, found.depth, True), (across, along, outer, False)):
        if inner == 1 and line % vector == 0 and line >= count((size,)):
            return Described(value.attr.buffer, start, line, other)
    return None


__all__ = ["Described", "are_odd", "blocks_along", "described_operands", "fused_kernel", "points_of"]
