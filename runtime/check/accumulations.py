"""Fused outer reductions under the checker: they reduce over the kernel's serial grid loop, and nothing in the kernel reads their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from ..ir.nodes import Buffer
from ..kernels.plan import Accumulate, Kernel
from .access import roots, vars_of


def check_accumulations(kernel: Kernel, buffers: Mapping[str, Buffer], fail: Callable[[str], NoReturn]) -> None:
    """Checks what only `Accumulate` has. That it writes each element once, with the program's value, is checked with the other stores."""
    loop = kernel.grid_loop
    if loop and kernel.outer[-len(loop) :] != loop:
        fail("its grid loop is not the last of its outer loops")
    if loop and kernel.serial:
        fail("it has a grid loop, but its outer loops are in order")
    statements = [st for phase in kernel.phases for st in phase.body]
    read = {ld.attr.buffer for st in statements for root in roots(st) for ld in root.loads()}
    for st in statements:
        if not isinstance(st, Accumulate):
            continue
        if not loop:
            fail(f"buffer {st.buffer!r} is accumulated, but the kernel has no grid loop")
        if st.buffer not in buffers:
            fail(f"{st.buffer!r} is accumulated, but is no buffer of the program")
        if st.mode != "set" or st.mask is not None or st.atomic:
            fail(f"buffer {st.buffer!r} is accumulated under a mask, or as an update")
        if any(not vars_of(e).isdisjoint(loop) for e in st.index):
            fail(f"buffer {st.buffer!r} is accumulated at a place that moves with the grid loop")
        if st.buffer in read:
            fail(f"buffer {st.buffer!r} is read by the kernel that accumulates it")


__all__ = ["check_accumulations"]
