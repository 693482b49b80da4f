"""Which kernels of a unit have blocks that can be measured, with which, and which of these is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..ir.index import Expr, Val
from ..ir.nodes import ITEMSIZE
from ..kernels.plan import Kernel, Plan, Reduce
from ..kernels.steps import allocation_root, nbytes
from ..render.triton_unit import TritonKernel, TritonUnit
from ..tile.blocks import UNKNOWN, neighbours
from ..tile.horizontal import HorizontalGroup
from ..tile.launch import launch
from ..tile.scratch import roots
from .autotune import Memory, Times, Trial

BETTER = 0.97  # of the time that the table's blocks take: less is no difference
_SPLIT = "tl.static_assert("  # a kernel whose blocks must not lie across the ranges of its index sets


def trials_of(
    plan: Plan, unit: TritonUnit, *, wide: bool = False, positions: bool = False
) -> Iterator[tuple[str, Trial | str]]:
    """Each kernel of a unit by its name, ready to be measured, or why it is not.

    wide       with many configurations, for measuring a table.
    positions  also where they come from data, which whoever measures has then.
    """
    kernels = {k.name: k for k in plan.kernels()}
    groups = {group.name: group for group in unit.grouped.values()}
    done: set[str] = set()
    for name in unit.programs:
        if (symbol := unit.symbols[name]) not in done:
            done.add(symbol)
            if name in unit.chained:
                yield symbol, "its last program runs other kernels"
                continue
            if name in unit.cooperative:
                yield symbol, "its programs wait for each other"
                continue
            group = groups.get(name)
            if group is None and name not in kernels:
                yield symbol, "a routine has blocks of its own"
                continue
            members = [kernels[m] for m in (group.kernels if group else (name,))]
            if any(k.tile is not None for k in members):
                continue  # its blocks were measured when it was chosen
            yield symbol, _why_not(members, plan, positions) or _trial(unit.kernels[symbol], members, group, plan, wide)


def _why_not(members: Sequence[Kernel], plan: Plan, positions: bool) -> str:
    names = [n for k in members for n in (*k.reads, *k.writes)]
    if any(k.symbols for k in members) or any(
        nbytes(plan.layouts[n]) is None or isinstance(plan.layouts[n].offset, Expr) for n in names
    ):
        return "its sizes are symbols"
    if not positions and any(map(_takes_positions, members)):
        return "its positions come from data"  # random ones would be out of range, or all the same
    return "it computes nothing" if launch(members[0], plan.layouts).outer == 0 else ""


def _takes_positions(kernel: Kernel) -> bool:
    statements = [st for phase in kernel.phases for st in phase.body]
    indices = [st.index for st in statements if not isinstance(st, Reduce)]
    indices += [ld.attr.index for st in statements for root in roots(st) for ld in root.loads()]
    return any(isinstance(a, Val) for index in indices for e in index for a in e.atoms())


def _trial(
    one: TritonKernel, members: Sequence[Kernel], group: HorizontalGroup | None, plan: Plan, wide: bool
) -> Trial:
    shape = launch(members[0], plan.layouts)
    start = one.xblock, one.rblock, one.warps
    limit = one.xblock if _SPLIT in one.source else UNKNOWN
    if group is None:
        found = neighbours(start, shape, limit, wide=wide)
    else:
        # RBLOCK counts blocks that a program does one after another: no part of a tile.
        shape = replace(shape, outer=max(group.points))
        alone = neighbours((one.xblock, 1, one.warps), shape, limit, wide=wide)
        found = [(x, one.rblock, w) for x, _, w in alone]
        found += [(one.xblock, r, one.warps) for r in (one.rblock // 2, 2 * one.rblock) if r > 1 and one.rblock > 1]
    tried = tuple(replace(one, xblock=x, rblock=r, warps=w) for x, r, w in found)
    memory: dict[str, Memory] = {}
    names = [n for k in members for n in (*k.reads, *k.writes)]
    for name in names:
        layout, where = plan.layouts[name], allocation_root(plan, name)
        size = nbytes(layout)
        assert size is not None
        assert isinstance(layout.offset, int)
        dtype = plan.layouts[where].dtype
        elements = -(-(size + layout.offset * ITEMSIZE[layout.dtype]) // ITEMSIZE[dtype])
        elements = max(elements, memory[where].elements if where in memory else 1)
        memory[where] = Memory(dtype, elements)
    return Trial(tried, tuple(allocation_root(plan, n) for n in names), memory, shape, group)


def fastest(trial: Trial, times: Times) -> TritonKernel:
    """Its fastest configuration; that of the table where no other is faster by enough to tell."""
    best = min(times.us, key=times.us.__getitem__)
    if 0 in times.us and times.us[best] > BETTER * times.us[0]:
        best = 0
    return trial.configurations[best]
