"""What the arguments of a plan's kernels are: where the elements are that a kernel reads and writes, for who must copy them."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.nodes import contiguous_strides
from ..ir.python_text import number, shape_text
from ..kernels.plan import Kernel, Plan
from ..kernels.routines import Routine
from ..kernels.steps import allocation_root

ALIGNED = "arena", "dedicated"  # memory of the graph's own

Described = list[str | bool]
"""dtype, shape, strides and offset as Python source, and whether it is written."""


def arguments(kernels: Sequence[Kernel | Routine], plan: Plan) -> tuple[list[str], list[Described | None]]:
    """Of a function that runs these: the names of its sizes, and its buffers in the order of their addresses; None for memory that begins at a
    multiple of 16.
    """
    buffers: list[Described | None] = []
    for k in kernels:
        for name in (*k.reads, *k.writes):
            if plan.allocations[allocation_root(plan, name)].kind in ALIGNED:
                buffers.append(None)
                continue
            b = plan.layouts[name]
            stride = contiguous_strides(b.shape) if b.stride is None else b.stride
            buffers.append([b.dtype, shape_text(b.shape), shape_text(stride), number(b.offset), name in k.writes])
    return list(kernels[0].symbols) if kernels else [], buffers


def written(kernel: Kernel | Routine) -> list[bool]:
    """Which of a kernel's buffers it writes, in the order of their addresses."""
    return [False] * len(kernel.reads) + [True] * len(kernel.writes)


__all__ = ["arguments", "written"]
