"""The plan checker on what only plans for a GPU have: fused outer reductions, and indexed updates apart from the copy of their base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from opforge.errors import PlanError
from opforge.runtime.check.plan import check
from opforge.runtime.ir.index import Var, of
from opforge.runtime.ir.nodes import Program
from opforge.runtime.kernels.plan import Accumulate, Kernel, KernelStep, Plan
from opforge.runtime.lower.language import scalar_ops as s
from opforge.runtime.schedule.draft import Options
from opforge.runtime.schedule.pipeline import schedule
from tests.support.loops import pointwise, program_of, reduce
from tests.support.machines import H200
from tests.unit.render.test_cpp import index_add

GPU = replace(H200, num_sms=4)


def rows_and_columns(b: Any, x: Any) -> Any:
    """Rows divided by their sums, and parts of the sums of columns: eight rows each."""
    total = reduce(b, "sum", x, 1, True)
    out = pointwise(b, s.div, x, total)
    i, r = b.coords((8, x.shape[1])), b.rcoords((8,))
    return out, b.reduce("sum", (8, x.shape[1]), r, b.at(x, [i[0] * 8 + r[0], i[1]]))


def planned() -> tuple[Program, Plan]:
    program = program_of(rows_and_columns, [torch.rand(64, 40)])
    return program, schedule(program, Options(machine=GPU))


def with_kernel(plan: Plan, change: Callable[[Kernel], Kernel]) -> Plan:
    (step,) = plan.steps
    assert isinstance(step, KernelStep)
    return replace(plan, steps=[KernelStep(change(step.kernel))])


def with_accumulation(plan: Plan, **fields: Any) -> Plan:
    """The plan with other fields of its accumulation."""

    def change(k: Kernel) -> Kernel:
        phases = [
            replace(p, body=tuple(replace(st, **fields) if isinstance(st, Accumulate) else st for st in p.body))
            for p in k.phases
        ]
        return replace(k, phases=tuple(phases))

    return with_kernel(plan, change)


def the_accumulation(plan: Plan) -> tuple[Kernel, Accumulate]:
    (kernel,) = plan.kernels()
    (found,) = (st for p in kernel.phases for st in p.body if isinstance(st, Accumulate))
    return kernel, found


def test_right() -> None:
    program, plan = planned()
    check(program, plan)
    kernel, _ = the_accumulation(plan)
    assert kernel.outer[-1:] == kernel.grid_loop


def test_which_reductions_are_fused() -> None:
    """Sums of columns into a kernel that goes along the memory of a row, and not the other way round where a row is too long for that."""

    def columns_and_rows(b: Any, x: Any) -> Any:
        i, r = b.coords((16, x.shape[1])), b.rcoords((4,))
        parts = b.reduce("sum", (16, x.shape[1]), r, b.at(x, [i[0] * 4 + r[0], i[1]]))
        return parts, reduce(b, "sum", x, 1, True)

    for columns, extents in ((40, [4]), (9000, [])):
        program = program_of(columns_and_rows, [torch.rand(64, columns)])
        plan = schedule(program, Options(machine=GPU))
        check(program, plan)
        assert [v.extent for k in plan.kernels() for v in k.grid_loop] == extents


def test_wrong_accumulations() -> None:
    program, plan = planned()
    kernel, found = the_accumulation(plan)

    def reject(wrong: Plan, message: str) -> None:
        with pytest.raises(PlanError, match=message):
            check(program, wrong)

    reject(with_accumulation(plan, kind="max"), "stores another value")
    reject(with_accumulation(plan, value=s.neg(found.value)), "stores another value")
    reject(with_accumulation(plan, mode="sum"), "under a mask, or as an update")
    moving = (of(kernel.grid_loop[0]), found.index[1])
    reject(with_accumulation(plan, index=moving), "a place that moves with the grid loop")
    reject(with_accumulation(plan, index=(found.index[0], of(Var("other", 40)))), "is not a loop of this phase")
    reject(with_kernel(plan, lambda k: replace(k, grid_loop=())), "has no grid loop")
    reject(with_kernel(plan, lambda k: replace(k, grid_loop=k.outer[:1])), "not the last of its outer loops")
    reject(with_kernel(plan, lambda k: replace(k, serial=True)), "outer loops are in order")


def test_update_apart_from_its_base() -> None:
    program = program_of(index_add, [torch.rand(10, 33), torch.randint(0, 10, (70,)), torch.rand(70, 33)])
    plan = schedule(program, Options(machine=GPU))
    check(program, plan)
    base, update = plan.steps
    with pytest.raises(PlanError, match="only the copy of 'in0'; its indexed update is missing"):
        check(program, replace(plan, steps=[base]))
    with pytest.raises(PlanError, match="never starts as a copy"):
        check(program, replace(plan, steps=[update]))
    with pytest.raises(PlanError, match="never starts as a copy"):
        check(program, replace(plan, steps=[update, base]))
