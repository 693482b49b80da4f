"""What a GPU can run as one kernel. This is decided before memory is planned, so that printers never have to refuse a kernel."""

from __future__ import annotations

from collections.abc import Mapping

from ...generated.languages import TRITON_LANGUAGE
from ...generated.triton_scalars import TRITON_COMBINE
from ..ir.nodes import Buffer
from ..kernels.operands import has_values
from ..kernels.plan import Kernel, Scan, Statement, Store
from .launch import launch
from .scratch import Rematerialized, rematerialized

__all__ = ["atomic", "in_registers", "refusal"]


def atomic(mode: str, dtype: str) -> str:
    """Triton's atomic operation for an indexed update; "" where there is none."""
    found = TRITON_LANGUAGE.atomics.get(mode)
    return found.operation if found is not None and dtype in found.dtypes else ""


def refusal(kernel: Kernel, layouts: Mapping[str, Buffer]) -> str:
    """Why no GPU runs the kernel, whatever values it keeps in memory; "" if one does."""
    for phase in kernel.phases:
        loops = sum(v.extent != 1 for v in phase.inner)
        for st in phase.body:
            if why := _refusal_of(st, loops, kernel, layouts):
                return why
    return ""


def _refusal_of(st: Statement, loops: int, kernel: Kernel, layouts: Mapping[str, Buffer]) -> str:
    if isinstance(st, Scan):
        if loops > 1:
            return "a scan goes along one loop, and has another one around it"
        return "" if st.kind in TRITON_COMBINE else f"Triton has no scan by {st.kind!r}"
    if not isinstance(st, Store):
        return ""
    if st.mode == "set":
        ordered = kernel.serial and any(map(has_values, st.index))
        return "the order of its updates matters" if ordered else ""
    dtype = layouts[st.buffer].dtype
    return "" if atomic(st.mode, dtype) else f"Triton has no atomic for an indexed update by {st.mode!r} of {dtype}"


def in_registers(kernel: Kernel, layouts: Mapping[str, Buffer]) -> Rematerialized:
    """The kernel with its scratch tiles in registers; which of them must be in memory instead; and which buffers must not share memory for that."""
    if not kernel.scratch:
        return Rematerialized(kernel, {}, frozenset())
    return rematerialized(kernel, launch(kernel, layouts).persistent)
