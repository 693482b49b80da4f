"""Cooperative reductions: how many programs share each of a few long rows, each with a split of it in registers.

The row is read from memory once. One kernel for partial results and another that uses them would read it twice, with a launch between them.
Programs that wait for each other must all run at once, so there are no more of them than the device has multiprocessors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ...generated.languages import TRITON_LANGUAGE
from ...generated.scalars import REDUCTIONS
from ..ir.index import Var, product
from ..ir.nodes import Buffer, Node, Size, load
from ..kernels.plan import Kernel, Reduce, Store
from ..kernels.statements import kernel_checks
from .launch import is_outer_reduction, launch, register_budget, split_size
from .scratch import over_groups, roots
from .transpose import transpose_tiled


def splits_of(kernel: Kernel, layouts: Mapping[str, Buffer], allocation_roots: Mapping[str, str]) -> int:
    """How many programs of its GPU should share each outer point of a kernel; 1 where that gains nothing, or is not possible.

    allocation_roots  for each buffer of the kernel the one whose memory it is in.
    """
    rows, length = product(v.extent for v in kernel.outer), _row(kernel)
    num_sms, cooperative = kernel.gpu.num_sms, kernel.gpu.costs.cooperative
    if not isinstance(rows, int) or not 0 < 2 * rows <= num_sms or rows * length <= cooperative.points:
        return 1
    wanted = min(num_sms // rows, length // cooperative.steps)
    if wanted < 2:
        return 1
    size = split_size(wanted, length, kernel.gpu)
    if 1 << (size - 1).bit_length() > register_budget(kernel, layouts) or not _is_by_rows(kernel, layouts):
        return 1
    if not _reads_only_its_split(kernel, layouts) or not _updates_are_safe(kernel, allocation_roots):
        return 1
    return -(-length // size)


def reductions(kernel: Kernel) -> int:
    """How many reductions have partial results that the programs publish."""
    return sum(isinstance(st, Reduce) and _steps(p.inner) != 1 for p in kernel.phases for st in p.body)


def _row(kernel: Kernel) -> int:
    """Steps of the inner loops of a kernel that can be cooperative: it reduces rows, and goes through them again after that. 0 for others."""
    if kernel.serial or kernel.symbols or kernel.grid_loop or kernel.parts or kernel.tile or kernel_checks(kernel):
        return 0
    looped = [p for p in kernel.phases if _steps(p.inner) != 1]
    lengths = {_steps(p.inner) for p in looped}
    if len(lengths) != 1:
        return 0
    (length,) = lengths
    if not isinstance(length, int) or not any(isinstance(st, Reduce) for p in looped[:-1] for st in p.body):
        return 0
    for phase in kernel.phases:
        for st in phase.body:
            plain = type(st) is Store and st.mode == "set" and st.mask is None
            if not plain and not (type(st) is Reduce and (phase not in looped or _can_publish(st))):
                return 0
    return length


def _is_by_rows(kernel: Kernel, layouts: Mapping[str, Buffer]) -> bool:
    """Whether a program goes through rows as they lie in memory, element by element."""
    return (
        transpose_tiled(kernel, layouts) is None
        and not launch(kernel, layouts).product
        and not is_outer_reduction(kernel, layouts)
    )


def _reads_only_its_split(kernel: Kernel, layouts: Mapping[str, Buffer]) -> bool:
    """Whether a program reads of what the kernel has stored only what it has stored itself: the same element at the same step, or one of the row."""
    stored: Counter[str] = Counter()
    known: set[Node] = set()
    dtypes = {b.name: b.dtype for b in kernel.scratch} | {b: layouts[b].dtype for b in kernel.writes}
    own = {*kernel.writes}  # and the tiles that are computed from them: to compute one again is to read them again
    for _, _, body in over_groups(kernel):  # over equal loops a program has the same steps
        for st in body:
            loads = {ld for root in roots(st) for ld in root.loads() if ld.attr.buffer in own}
            if not loads <= known or any(stored[ld.attr.buffer] != 1 for ld in loads):
                return False
            if isinstance(st, Store):
                if loads:
                    own.add(st.buffer)
                stored[st.buffer] += 1
                known.add(load(st.buffer, st.index, dtypes[st.buffer]))
    return True


def _updates_are_safe(kernel: Kernel, allocation_roots: Mapping[str, str]) -> bool:
    """Whether no program reads what another one of its row may have overwritten (updates in place): all phases go through the elements of a row
    in one order, so that each belongs to one program; and an element for the whole row is read only for a store that one program does.
    """
    over = {allocation_roots[b] for b in kernel.writes} & {allocation_roots[b] for b in kernel.reads}
    if not over:
        return True
    inner = [tuple(v for v in p.inner if v.extent != 1) for p in kernel.phases]
    if len({loops for loops in inner if loops}) != 1:
        return False
    by_row = {
        allocation_roots[st.buffer]
        for p, loops in zip(kernel.phases, inner, strict=True)
        if not loops
        for st in p.body
        if isinstance(st, Store)
    }
    for phase, loops in zip(kernel.phases, inner, strict=True):
        for st in phase.body:
            read = {
                allocation_roots[b]
                for root in roots(st)
                for ld in root.loads()
                if (b := ld.attr.buffer) in allocation_roots
            }
            if read & over & by_row and (loops or not isinstance(st, Store)):
                return False
    return True


def _can_publish(st: Reduce) -> bool:
    return REDUCTIONS[st.kind].combine is not None and st.dtype == st.value.dtype in TRITON_LANGUAGE.published


def _steps(loops: tuple[Var, ...]) -> Size:
    return product(v.extent for v in loops)


__all__ = ["reductions", "splits_of"]
