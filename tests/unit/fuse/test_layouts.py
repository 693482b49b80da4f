"""How values inside of a graph lie in memory on a GPU, and what is written once there. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opforge.runtime.check.plan import check
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.kernels.plan import ExternStep, Plan, ViewOf
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.render.triton_unit import blocks
from opforge.runtime.targets.cuda import prepared, scheduled
from opforge.runtime.tile.launch import launch
from tests.support import gpu_plan
from tests.support.machines import H200


def planned(fn: Callable[..., Any], *inputs: Tensor) -> Plan:
    """The plan for a GPU, checked."""
    program = prepared(separate_outputs(lower(trace(fn, inputs).graph).program), H200)
    plan = scheduled(program, Config(), H200)
    check(program, plan)
    return plan


def last(*shape: int) -> Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def test_values_lie_as_what_they_are_made_of() -> None:
    """The values of a softmax over channels are summed over the others: both read them."""

    def fn(x: Tensor) -> Tensor:
        y = x.exp().sin().cumsum(2)
        return y.sum((2, 3)) + y.amax((2, 3))

    plan = planned(fn, last(4, 64, 32, 32))
    large = [b for b in plan.layouts.values() if b.shape == (4, 64, 32, 32)]
    assert large
    pooled = planned(
        lambda g, i: torch.zeros(4, 64, 4096).scatter_add(-1, i.flatten(2), g.flatten(2)).view(4, 64, 64, 64) * 2,
        last(4, 64, 32, 32),
        torch.zeros(4, 64, 32, 32, dtype=torch.int64).to(memory_format=torch.channels_last),
    )
    updated = [b for b in pooled.layouts.values() if b.shape == (4, 64, 4096)]
    assert [b.stride for b in updated] == [(64 * 4096, 1, 64)]  # and the zeros are no buffer of their own
    (base,) = (k for k in pooled.kernels() if k.name.endswith("_base"))
    assert not base.reads


def test_sums_of_parts_share_a_kernel() -> None:
    """The backward of a batch norm: both sums are of the same parts."""
    x, c = last(32, 64, 56, 56), torch.ones(64)

    def fn(g: Tensor, x: Tensor, c: Tensor) -> Any:
        return torch.ops.aten.native_batch_norm_backward(g, x, c, None, None, c, c, True, 1e-5, [True] * 3)

    plan = planned(fn, x, x, c)
    assert len(plan.kernels()) == 3
    sums = launch(plan.kernels()[0], plan.layouts)
    assert sums.outer_reduction
    assert sums.persistent
    assert sums.sums
    xblock, rblock, warps = blocks(sums)
    assert xblock * rblock == 2048 * warps  # each warp that has to meet costs more than what it adds up


def test_a_view_that_repeats_a_value_is_strides_over_it() -> None:
    """A mask of all heads and all queries, which a library reads: it is stored once for each key."""

    def fn(q: Tensor, kept: Tensor) -> Tensor:
        mask = torch.where(kept, 0.0, -torch.inf)[:, None, None].expand(-1, 4, 16, -1)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, attn_mask=mask)[0]

    plan = planned(fn, torch.randn(2, 4, 16, 8), torch.ones(2, 16, dtype=torch.bool))
    assert [s.buffer for k in plan.kernels() for p in k.phases for s in p.body] != []
    (call,) = (step for step in plan.steps if isinstance(step, ExternStep))
    (view,) = (a for _, a in call.kwargs if isinstance(a, ViewOf))
    assert view.stride[1:] == (0, 0, 1)
    assert plan.layouts[view.buffer].shape == (2, 16)


def test_operands_of_different_layouts() -> None:
    """Row-major where as many operands are: a stream of residuals to which one transposed tensor was added does not stay transposed."""
    norm = torch.nn.functional.layer_norm

    def fn(x: Tensor, beside: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = norm(x + beside.transpose(1, 2), (96,))
        y = norm(y + y @ a, (96,))
        return norm(y + y @ b, (96,))

    plan = planned(fn, torch.randn(8, 499, 96), torch.randn(8, 96, 499), torch.randn(8, 96, 96), torch.randn(8, 96, 96))
    assert len(plan.kernels()) == 3, "one for each norm"
    assert {b.stride for b in plan.layouts.values() if b.shape == (8, 499, 96)} == {(499 * 96, 96, 1)}


def test_loss_and_its_gradient_read_the_logits_in_one_kernel() -> None:
    """How many targets count is known first; the sum of a row that has one element is no loop."""

    def fn(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        known = logits.log_softmax(-1)
        loss, weight = torch.ops.aten.nll_loss_forward(known, targets, None, 1, -100)
        one = torch.ones(())
        grad = torch.ops.aten.nll_loss_backward(one, known, targets, None, 1, -100, weight)
        return loss, torch.ops.aten._log_softmax_backward_data(grad, known, 1, torch.float32)

    inputs = torch.empty(8192, 4096), torch.zeros(8192, dtype=torch.int64)
    plan = gpu_plan.planned(fn, inputs)
    readers = [k for k in plan.kernels() if plan.inputs[0].name in k.reads and k.outer]
    (rows,) = readers
    assert any(len(p.inner) == 1 and "log_softmax_backward" in str(p.body) for p in rows.phases)
    assert plan.kernels()[0].reads == (plan.inputs[1].name,)
