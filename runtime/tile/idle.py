"""In-place kernels that change nothing if one value, the same for all points, is true: their programs look at that value first.

Such a kernel has few programs, each of which goes through many blocks: to launch a million programs takes half as long as the work, even if
each of them ends at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.nodes import Buffer, Node
from ..kernels.plan import Kernel, Store
from ..kernels.steps import flat_index
from .coalesce import coalesced
from .launch import Launch, launch
from .passes import merge_passes
from .scratch import rematerialized
from .transpose import transpose_tiled


def idle_where(kernel: Kernel, layouts: Mapping[str, Buffer], allocation_roots: Mapping[str, str]) -> Node | None:
    """That value, a bool; None for other kernels. `allocation_roots`: for buffers that are in the memory of another, which one."""
    if kernel.symbols or kernel.parts or kernel.scratch or kernel.grid_loop or len(kernel.phases) != 1:
        return None
    written = {allocation_roots.get(b, b) for b in kernel.writes}
    found: set[Node] = set()
    for st in kernel.phases[0].body:
        if type(st) is not Store or st.mode != "set" or st.mask is not None or st.value.op != "where":
            return None
        condition, same, _ = st.value.args
        if same.op != "load" or same.args or condition.vars():
            return None
        there, here = layouts[same.attr.buffer], layouts[st.buffer]
        if (
            allocation_roots.get(there.name, there.name) != allocation_roots.get(here.name, here.name)
            or there.dtype != here.dtype
        ):
            return None
        if flat_index(same.attr.index, there) != flat_index(st.index, here):
            return None
        if any(allocation_roots.get(ld.attr.buffer, ld.attr.buffer) in written for ld in condition.loads()):
            return None
        found.add(condition)
    return found.pop() if len(found) == 1 else None


def as_rendered(kernel: Kernel, layouts: Mapping[str, Buffer], shape: Launch) -> tuple[Kernel, Mapping[str, Buffer]]:
    """The kernel with the loops of its text, and the layouts of its buffers."""
    tiled = transpose_tiled(kernel, layouts)
    kernel, layouts = (tiled, layouts) if tiled else coalesced(kernel, layouts) or (kernel, layouts)
    kernel = rematerialized(kernel, shape.persistent).kernel
    return kernel if shape.persistent else merge_passes(kernel), layouts


def goes_in_strides(kernel: Kernel, layouts: Mapping[str, Buffer], allocation_roots: Mapping[str, str]) -> bool:
    """Whether a kernel that is launched alone may have any number of programs, since each goes through blocks until all are done."""
    if idle_where(kernel, layouts, allocation_roots) is None:
        return False
    shape = launch(kernel, layouts)
    return not shape.product and idle_where(*as_rendered(kernel, layouts, shape), allocation_roots) is not None


__all__ = ["as_rendered", "goes_in_strides", "idle_where"]
