"""Kernels in place that leave all they would store as it is where one value, the same for all points, says so: their programs look at it first."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.nodes import Buffer, Node
from ..schedule.memory import flat_index
from ..schedule.plan import Kernel, Store


def idle_where(kernel: Kernel, layouts: Mapping[str, Buffer], homes: Mapping[str, str]) -> Node | None:
    """The value, a bool; None for other kernels. `homes`: for buffers that are in the memory of another, which one."""
    if kernel.symbols or kernel.parts or kernel.scratch or kernel.walk or len(kernel.phases) != 1:
        return None
    written = {homes.get(b, b) for b in kernel.writes}
    found: set[Node] = set()
    for st in kernel.phases[0].body:
        if type(st) is not Store or st.mode != "set" or st.mask is not None or st.value.op != "where":
            return None
        condition, same, _ = st.value.args
        if same.op != "load" or same.args or condition.vars():
            return None
        there, here = layouts[same.attr.buffer], layouts[st.buffer]
        if homes.get(there.name, there.name) != homes.get(here.name, here.name) or there.dtype != here.dtype:
            return None
        if flat_index(same.attr.index, there) != flat_index(st.index, here):
            return None
        if any(homes.get(ld.attr.buffer, ld.attr.buffer) in written for ld in condition.loads()):
            return None
        found.add(condition)
    return found.pop() if len(found) == 1 else None
