"""The plan checker on what only plans for a GPU have: folds along a walk, and indexed updates apart from the copy of their base."""

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
from opforge.runtime.kernels.plan import Fold, Kernel, KernelStep, Plan
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


def with_fold(plan: Plan, **fields: Any) -> Plan:
    """The plan with other fields of its fold."""

    def change(k: Kernel) -> Kernel:
        phases = [
            replace(p, body=tuple(replace(st, **fields) if isinstance(st, Fold) else st for st in p.body))
            for p in k.phases
        ]
        return replace(k, phases=tuple(phases))

    return with_kernel(plan, change)


def the_fold(plan: Plan) -> tuple[Kernel, Fold]:
    (kernel,) = plan.kernels()
    (fold,) = (st for p in kernel.phases for st in p.body if isinstance(st, Fold))
    return kernel, fold


def test_right() -> None:
    program, plan = planned()
    check(program, plan)
    kernel, _ = the_fold(plan)
    assert kernel.outer[-1:] == kernel.walk


def test_what_is_folded_into_what() -> None:
    """Sums of columns into a kernel that goes along the memory of a row, and not the other way round where a row is too long for that."""

    def columns_and_rows(b: Any, x: Any) -> Any:
        i, r = b.coords((16, x.shape[1])), b.rcoords((4,))
        parts = b.reduce("sum", (16, x.shape[1]), r, b.at(x, [i[0] * 4 + r[0], i[1]]))
        return parts, reduce(b, "sum", x, 1, True)

    for columns, walked in ((40, [4]), (9000, [])):
        program = program_of(columns_and_rows, [torch.rand(64, columns)])
        plan = schedule(program, Options(machine=GPU))
        check(program, plan)
        assert [v.extent for k in plan.kernels() for v in k.walk] == walked


def test_wrong_folds() -> None:
    program, plan = planned()
    kernel, fold = the_fold(plan)

    def reject(wrong: Plan, message: str) -> None:
        with pytest.raises(PlanError, match=message):
            check(program, wrong)

    reject(with_fold(plan, kind="max"), "stores another value")
    reject(with_fold(plan, value=s.neg(fold.value)), "stores another value")
    reject(with_fold(plan, mode="sum"), "under a mask, or as an update")
    walked = (of(kernel.walk[0]), fold.index[1])
    reject(with_fold(plan, index=walked), "a place that moves along the walk")
    reject(with_fold(plan, index=(fold.index[0], of(Var("other", 40)))), "is not a loop of this phase")
    reject(with_kernel(plan, lambda k: replace(k, walk=())), "walks no loop")
    reject(with_kernel(plan, lambda k: replace(k, walk=k.outer[:1])), "not the last of its outer loops")
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
