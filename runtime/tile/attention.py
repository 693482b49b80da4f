"""Two products around a softmax as one kernel: its blocks of rows."""

from __future__ import annotations

from collections.abc import Mapping

from ..fuse.attention import Attention, attention
from ..ir.index import Var
from ..ir.nodes import Buffer
from ..kernels.calls import factors
from ..kernels.operands import count
from ..kernels.plan import Kernel
from ..machine import Gpu


def attention_of(kernel: Kernel, layouts: Mapping[str, Buffer]) -> Attention:
    """What a kernel with parts computes."""
    found = attention(kernel.parts, layouts, factors)
    assert found is not None, kernel.name
    return found


def points(found: Attention, gpu: Gpu) -> int:
    """Rows of all batches, in whole blocks: so many, divided by the rows of a block, are the programs."""
    return count(found.batch) * rows_in_blocks(found, gpu)


def widest(found: Attention, gpu: Gpu) -> int:
    """Elements of a block's row of operands, of those that have more."""
    return max(least_block(found.depth, gpu), least_block(found.width, gpu))


def least_block(v: Var, gpu: Gpu) -> int:
    """The least power of two that is at least the extent of a loop and the smallest block of the matrix units."""
    assert isinstance(v.extent, int)
    return max(gpu.limits.mma.edge, 1 << (v.extent - 1).bit_length())


def rows_in_blocks(found: Attention, gpu: Gpu) -> int:
    most = gpu.tuning.attention.rows
    return -(-count(found.rows) // most) * most


__all__ = ["attention_of", "least_block", "points", "rows_in_blocks", "widest"]
