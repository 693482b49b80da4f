"""What a GPU's plans know of memory: the order of loops, rows of whole vectors, and sums that are cut along several loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from opforge.runtime.kernels.plan import ExternStep, Plan

pytest.importorskip("triton")

from tests.support import gpu_plan

HALF = torch.bfloat16


def planned(fn: Callable[..., Any], *inputs: Tensor) -> Plan:
    return gpu_plan.planned(fn, inputs)


def channels_last(*shape: int) -> Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


def test_loops_are_in_the_order_of_memory() -> None:
    (kernel,) = planned(lambda x, w: F.relu(x * w), channels_last(4, 32, 14, 14), torch.randn(1, 32, 1, 1)).kernels()
    assert [v.extent for v in kernel.outer] == [4, 14, 14, 32]
    (kernel,) = planned(lambda x, w: F.relu(x * w), torch.randn(4, 32, 14, 14), torch.randn(1, 32, 1, 1)).kernels()
    assert [v.extent for v in kernel.outer] == [4, 32, 14, 14]


def test_points_along_channels_are_not_left_to_the_kernel_of_their_sums() -> None:
    """64 channels are one program, which would go through all of it."""
    plan = planned(lambda x: x - x.mean((0, 2, 3), keepdim=True), channels_last(32, 64, 56, 56))
    first, *_, last = plan.kernels()
    assert [v.extent for v in last.outer] == [32, 56, 56, 64]
    assert len(first.outer) == 3  # cut along two loops: 32 parts are too few
    assert (first.outer[0].extent, first.outer[-1].extent) == (32, 64)


def calls(plan: Plan) -> list[ExternStep]:
    return [step for step in plan.steps if isinstance(step, ExternStep)]


def test_logits_have_rows_of_whole_vectors() -> None:
    """Inside of the graph: what it returns is as eager returns it."""
    x, w = torch.randn(2048, 64, dtype=HALF), torch.randn(1027, 64, dtype=HALF)
    plan = planned(lambda x, w: x @ w.t(), x, w)
    (call,) = calls(plan)
    assert plan.layouts[call.call.outs[0].name].shape == (2048, 1032)
    (output,) = plan.outputs
    assert (output.shape, output.stride) == ((2048, 1027), (1027, 1))


def test_a_gradient_of_logits_is_stored_once_for_its_products() -> None:
    def program(d: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        d = d.exp().to(HALF)
        return d @ w, d.t() @ x

    plan = planned(
        program, torch.randn(2048, 1024), torch.randn(1024, 64, dtype=HALF), torch.randn(2048, 64, dtype=HALF)
    )
    (kernel,) = plan.kernels()
    assert len(kernel.writes) == 1


def test_rows_of_what_only_products_read_are_wider() -> None:
    def program(d: Tensor, x: Tensor) -> Tensor:
        return d.exp() @ x

    plan = planned(program, torch.randn(2048, 1027), torch.randn(1027, 64))
    (kernel,) = plan.kernels()
    assert plan.layouts[kernel.writes[0]].stride == (1056, 1)


def test_small_products_stay_as_they_are() -> None:
    plan = planned(lambda x, w: x @ w.t(), torch.randn(20, 60, dtype=HALF), torch.randn(27, 60, dtype=HALF))
    assert plan.kernels() == []


def test_what_belongs_to_a_row_is_read_beside_its_padding_too() -> None:
    """A mask is for what lies outside: with one, a value of the row would be read for each element."""
    x, rows, wider = torch.randn(64, 1025), torch.randn(64, 1), torch.randn(64, 1040)
    (kernel,) = planned(lambda x, r, w: F.pad((x - r).exp() * w[:, :1025], (0, 7)), x, rows, wider).kernels()
    ((store,),) = (p.body for p in kernel.phases)
    masks = {ld.attr.buffer: bool(ld.args) for ld in store.value.loads()}
    assert masks == {"arg0": True, "arg1": False, "arg2": False}
