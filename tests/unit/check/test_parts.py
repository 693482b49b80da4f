"""Kernels that run steps as one: the checker accepts a right one, and rejects each way of breaking it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from opforge.errors import PlanError
from opforge.runtime.check.plan import check
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.ir.nodes import Node, Program
from opforge.runtime.kernels.plan import Allocation, ExternStep, Kernel, KernelStep, Phase, Plan, Store, ViewOf
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.targets.cuda import prepared, scheduled
from tests.support.machines import H200

GPU = replace(H200, num_sms=4)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (torch.softmax(q @ k.transpose(-1, -2) + bias, -1) @ v).relu()


def made(fn: Callable[..., Tensor | tuple[Tensor, ...]] = attend) -> tuple[Program, Plan]:
    inputs = [torch.randn(2, 64, 32).bfloat16() for _ in range(3)] + [torch.randn(64, 64).bfloat16()]
    with torch.no_grad():
        traced = trace(fn, inputs)
    program = prepared(separate_outputs(lower(traced.graph).program), GPU)
    plan = scheduled(program, Config(), GPU)
    check(program, plan)
    return program, plan


def joined(plan: Plan) -> Kernel:
    return next(k for k in plan.kernels() if k.parts)


def put(plan: Plan, kernel: Kernel) -> None:
    """The plan with another one in the place of its joined kernel."""
    k = next(k for k, s in enumerate(plan.steps) if isinstance(s, KernelStep) and s.kernel.parts)
    plan.steps[k] = KernelStep(kernel)


def rejects(program: Program, plan: Plan, *parts: str) -> None:
    with pytest.raises(PlanError) as error:
        check(program, plan)
    for part in parts:
        assert part in str(error.value)


def test_what_parts_pass_on_has_no_memory() -> None:
    program, plan = made()
    first = joined(plan).parts[0]
    assert isinstance(first, ExternStep)
    (scores,) = first.out
    assert plan.allocations[scores].kind == "elided"
    plan.allocations[scores] = Allocation("dedicated")
    rejects(program, plan, scores, "has a place in memory")


def test_nobody_else_reads_what_parts_pass_on() -> None:
    program, plan = made()
    (scores,) = joined(plan).parts[0].out  # type: ignore[union-attr]
    b = plan.layouts[scores]
    assert b.stride is not None
    plan.outputs = (ViewOf(scores, b.shape, b.stride, 0),)
    rejects(program, plan, scores, "never stored")


def test_results_do_not_lie_over_what_is_read() -> None:
    program, plan = made()
    kernel = joined(plan)
    (result,) = kernel.writes
    for other in kernel.reads:
        plan.allocations[result] = Allocation("alias", 0, other)
        rejects(program, plan, result, "may still read")


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (1, 2), (0, 1)])
def test_parts_are_complete_and_in_order(order: tuple[int, ...]) -> None:
    program, plan = made()
    kernel = joined(plan)
    put(plan, replace(kernel, parts=tuple(kernel.parts[k] for k in order)))
    rejects(program, plan, "part")


def test_arguments_are_told() -> None:
    program, plan = made()
    kernel = joined(plan)
    put(plan, replace(kernel, reads=kernel.reads[1:]))
    rejects(program, plan, kernel.reads[0], "neither an argument nor made")


def test_calls_get_their_arguments() -> None:
    program, plan = made()
    kernel = joined(plan)
    first, *others = kernel.parts
    assert isinstance(first, ExternStep)
    put(plan, replace(kernel, parts=(replace(first, args=(first.args[0], first.args[0])), *others)))
    rejects(program, plan, "view")


def test_values_are_the_programs() -> None:
    program, plan = made()
    kernel = joined(plan)
    first, middle, last = kernel.parts
    assert isinstance(middle, KernelStep)
    *phases, end = middle.kernel.phases
    (store,) = end.body
    assert isinstance(store, Store)
    other = Phase(end.inner, (replace(store, value=Node("neg", (store.value,), store.value.dtype)),))
    changed = KernelStep(replace(middle.kernel, phases=(*phases, other)))
    put(plan, replace(kernel, parts=(first, changed, last)))
    rejects(program, plan, "another value")


def test_parts_have_no_parts_and_their_kernel_no_loops() -> None:
    program, plan = made()
    kernel = joined(plan)
    middle = kernel.parts[1]
    assert isinstance(middle, KernelStep)
    put(plan, replace(kernel, phases=middle.kernel.phases))
    rejects(program, plan, "loops of its own")
    put(plan, replace(kernel, parts=(KernelStep(replace(kernel, name="inner")),)))
    rejects(program, plan, "has parts itself")


def test_calls_are_made_once() -> None:
    program, plan = made()
    kernel = joined(plan)
    put(plan, replace(kernel, parts=(*kernel.parts[:2], kernel.parts[0], kernel.parts[2])))
    rejects(program, plan, "made by two parts")
    program, plan = made()
    plan.steps.insert(0, replace(joined(plan).parts[0]))
    rejects(program, plan)


# -- what is not joined ------------------------------------------------------------------------------------------------
def _scores_returned(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    scores = q @ k.transpose(-1, -2)
    return torch.softmax(scores + bias, -1) @ v, scores


def _probabilities_returned(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    shares = torch.softmax(q @ k.transpose(-1, -2) + bias, -1)
    return shares @ v, shares


def _scores_read_again(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    return torch.softmax(scores + bias, -1) @ v + scores.sum()


def _of_float32(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return attend(q.float(), k.float(), v.float(), bias)


def _probabilities_in_float32(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(-1, -2)).float() + bias, -1) @ v.float()


def _scaled_after(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) + bias, -1) * 2 @ v


def _along_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) + bias, -2) @ v


def _transposed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) + bias, -1).transpose(-1, -2) @ v


def _turned(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The softmax of the transposed scores."""
    return torch.softmax((q @ k.transpose(-1, -2)).transpose(-1, -2) + bias, -1) @ v


def _of_themselves(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    shares = torch.softmax(q @ k.transpose(-1, -2) + bias, -1)
    return shares @ shares


def _without_a_maximum(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    e = (q @ k.transpose(-1, -2) + bias).float().exp()
    return (e / e.sum(-1, keepdim=True)).bfloat16() @ v


@pytest.mark.parametrize(
    "fn",
    [
        _scores_returned,
        _probabilities_returned,
        _scores_read_again,
        _of_float32,
        _probabilities_in_float32,
        _scaled_after,
        _along_rows,
        _transposed,
        _turned,
        _of_themselves,
        _without_a_maximum,
    ],
    ids=lambda fn: fn.__name__.strip("_").replace("_", " "),
)
def test_not_joined(fn: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
    _, plan = made(fn)
    assert not any(k.parts for k in plan.kernels())
