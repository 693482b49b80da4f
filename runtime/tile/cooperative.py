"""Few long rows: how many programs go through one row together, each with a piece of it in registers (`render/triton_team.py` says how).

The row is read from memory once, where a kernel for parts of the reduction and one for what is made of it read it twice, with a launch between them.
Programs that wait for each other must all be running, so there are no more of them than the device has multiprocessors.
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
from .launch import across, launch, piece_of, room
from .scratch import over_groups, roots
from .transpose import squared


def team_of(kernel: Kernel, layouts: Mapping[str, Buffer], homes: Mapping[str, str]) -> int:
    """How many programs of its GPU should share each outer point of a kernel; 1 where that gains nothing, or cannot be.

    homes  for each buffer of the kernel the one whose memory it is in.
    """
    rows, length = product(v.extent for v in kernel.outer), _row(kernel)
    num_sms, cooperative = kernel.gpu.num_sms, kernel.gpu.costs.cooperative
    if not isinstance(rows, int) or not 0 < 2 * rows <= num_sms or rows * length <= cooperative.points:
        return 1
    wanted = min(num_sms // rows, length // cooperative.piece)
    if wanted < 2:
        return 1
    piece = piece_of(wanted, length, kernel.gpu)
    if 1 << (piece - 1).bit_length() > room(kernel, layouts) or not _is_by_rows(kernel, layouts):
        return 1
    return -(-length // piece) if _reads_its_own(kernel, layouts) and _writes_apart(kernel, homes) else 1


def reductions(kernel: Kernel) -> int:
    """How many reductions programs of a team tell each other of."""
    return sum(isinstance(st, Reduce) and _steps(p.inner) != 1 for p in kernel.phases for st in p.body)


def _row(kernel: Kernel) -> int:
    """Steps of the inner loops of a kernel that a team can run: it reduces rows, and goes through them again after that. 0 for others."""
    if kernel.serial or kernel.symbols or kernel.walk or kernel.parts or kernel.tile or kernel_checks(kernel):
        return 0
    deep = [p for p in kernel.phases if _steps(p.inner) != 1]
    lengths = {_steps(p.inner) for p in deep}
    if len(lengths) != 1:
        return 0
    (length,) = lengths
    if not isinstance(length, int) or not any(isinstance(st, Reduce) for p in deep[:-1] for st in p.body):
        return 0
    for phase in kernel.phases:
        for st in phase.body:
            plain = type(st) is Store and st.mode == "set" and st.mask is None
            if not plain and not (type(st) is Reduce and (phase not in deep or _can_tell(st))):
                return 0
    return length


def _is_by_rows(kernel: Kernel, layouts: Mapping[str, Buffer]) -> bool:
    """Whether a program goes through rows as they lie in memory, element by element."""
    return squared(kernel, layouts) is None and not launch(kernel, layouts).product and not across(kernel, layouts)


def _reads_its_own(kernel: Kernel, layouts: Mapping[str, Buffer]) -> bool:
    """Whether all that is read of what the kernel has stored is known to whoever reads it: the same element at the same step, or one of the row."""
    stored: Counter[str] = Counter()
    known: set[Node] = set()
    dtypes = {b.name: b.dtype for b in kernel.scratch} | {b: layouts[b].dtype for b in kernel.writes}
    own = {*kernel.writes}  # and the tiles that are made of them: who computes one again reads them again
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


def _writes_apart(kernel: Kernel, homes: Mapping[str, str]) -> bool:
    """Whether nobody needs what another program of the team may have stored over (updates in place): elements of a row are met in one order in all
    phases, each by one program; and what belongs to a row is read for such a store alone, which one program's counts of.
    """
    over = {homes[b] for b in kernel.writes} & {homes[b] for b in kernel.reads}
    if not over:
        return True
    deep = [tuple(v for v in p.inner if v.extent != 1) for p in kernel.phases]
    if len({loops for loops in deep if loops}) != 1:
        return False
    by_row = {
        homes[st.buffer]
        for p, loops in zip(kernel.phases, deep, strict=True)
        if not loops
        for st in p.body
        if isinstance(st, Store)
    }
    for phase, loops in zip(kernel.phases, deep, strict=True):
        for st in phase.body:
            read = {homes[b] for root in roots(st) for ld in root.loads() if (b := ld.attr.buffer) in homes}
            if read & over & by_row and (loops or not isinstance(st, Store)):
                return False
    return True


def _can_tell(st: Reduce) -> bool:
    return REDUCTIONS[st.kind].combine is not None and st.dtype == st.value.dtype in TRITON_LANGUAGE.published


def _steps(loops: tuple[Var, ...]) -> Size:
    return product(v.extent for v in loops)


__all__ = ["reductions", "team_of"]
