"""Folds under the checker: that a kernel's walk is what its folds reduce over, and that nothing reads their results before they are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from ..ir.nodes import Buffer
from ..kernels.plan import Fold, Kernel
from .access import roots, vars_of


def check_folds(kernel: Kernel, buffers: Mapping[str, Buffer], fail: Callable[[str], NoReturn]) -> None:
    """What is particular to them. That they write each element once, with the program's value, is checked with the other stores."""
    walk = kernel.walk
    if walk and kernel.outer[-len(walk) :] != walk:
        fail("its walk is not the last of its outer loops")
    if walk and kernel.serial:
        fail("it walks, but its outer loops are in order")
    statements = [st for phase in kernel.phases for st in phase.body]
    read = {ld.attr.buffer for st in statements for root in roots(st) for ld in root.loads()}
    for st in statements:
        if not isinstance(st, Fold):
            continue
        if not walk:
            fail(f"buffer {st.buffer!r} is folded, but the kernel walks no loop")
        if st.buffer not in buffers:
            fail(f"{st.buffer!r} is folded, but is no buffer of the program")
        if st.mode != "set" or st.mask is not None or st.atomic:
            fail(f"buffer {st.buffer!r} is folded under a mask, or as an update")
        if any(not vars_of(e).isdisjoint(walk) for e in st.index):
            fail(f"buffer {st.buffer!r} is folded to a place that moves along the walk")
        if st.buffer in read:
            fail(f"buffer {st.buffer!r} is read by the kernel that folds it")


__all__ = ["check_folds"]
