"""Max pools and their gradients as for a GPU: no atomics, no eager kernel, and positions in few bits from the forward to the backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from opforge.generated.rewrites import RULES
from opforge.runtime.check.plan import check
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.graph.rewrite import rewrite
from opforge.runtime.kernels.plan import ExternStep, Plan
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.targets.cuda import prepared, scheduled
from opforge.runtime.training import split
from tests.support.gpu_plan import planned
from tests.support.machines import H200
from tests.support.triton_run import compile_sm90, job_of, launch_interpreted, results

aten = torch.ops.aten
POOLS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "2d": (
        lambda x: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1]),
        lambda g, x, i: aten.max_pool2d_with_indices_backward(g, x, [3, 3], [2, 2], [1, 1], [1, 1], False, i),
    ),
    "dilated, beyond the border": (
        lambda x: aten.max_pool2d_with_indices(x, [3, 2], [2, 3], [1, 1], [2, 1], True),
        lambda g, x, i: aten.max_pool2d_with_indices_backward(g, x, [3, 2], [2, 3], [1, 1], [2, 1], True, i),
    ),
    "large windows": (
        lambda x: aten.max_pool2d_with_indices(x, [5, 5], [1, 1], [2, 2]),
        lambda g, x, i: aten.max_pool2d_with_indices_backward(g, x, [5, 5], [1, 1], [2, 2], [1, 1], False, i),
    ),
    "adaptive": (
        lambda x: aten.adaptive_max_pool2d(x, [4, 5]),
        lambda g, x, i: aten.adaptive_max_pool2d_backward(g, x, i),
    ),
    "3d": (
        lambda x: aten.max_pool3d_with_indices(x, [1, 3, 3], [1, 2, 2], [0, 1, 1]),
        lambda g, x, i: aten.max_pool3d_with_indices_backward(
            g, x, [1, 3, 3], [1, 2, 2], [0, 1, 1], [1, 1, 1], False, i
        ),
    ),
}


def plan_and_inputs(name: str) -> tuple[Plan, list[Tensor], Tensor]:
    """The plan of a gradient behind an activation, its inputs, and the result."""
    torch.manual_seed(0)
    pool, back = POOLS[name]
    x = torch.randint(-2, 3, (2, 3, 13, 11)).float()
    y, i = pool(x)
    g = torch.randn_like(y)
    return planned(lambda g, x, i: back(g, x, i) * (x > 0), [g, x, i]), [g, x, i], back(g, x, i) * (x > 0)


def test_right() -> None:
    cases = [plan_and_inputs(name) for name in POOLS]
    memories = launch_interpreted([job_of(plan, inputs) for plan, inputs, _ in cases])
    for name, (plan, _, want), memory in zip(POOLS, cases, memories, strict=True):
        (got,) = results(plan, memory)
        torch.testing.assert_close(got, want, msg=name)


@pytest.mark.parametrize("name", POOLS)
def test_one_kernel_without_atomics(name: str) -> None:
    plan, _, _ = plan_and_inputs(name)
    (kernel,) = plan.kernels()
    assert not any(isinstance(step, ExternStep) for step in plan.steps)
    assert "atomic" not in render_triton(plan).source
    assert compile_sm90(kernel, plan.layouts)[:4] == b"\x7fELF"


@pytest.mark.parametrize(("size", "dtype"), [(112, torch.int16), (200, torch.int32)])
def test_positions_are_kept_in_few_bits(size: int, dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, size, size, dtype=torch.bfloat16, requires_grad=True)
    traced = trace(lambda x: F.max_pool2d(x.sin(), 3, 2, 1), [x], training=True)
    rewrite(traced.graph, RULES, device="cuda")
    parts = split(traced)
    kept = [n.meta["val"] for n in parts.backward.graph.graph.nodes if n.op == "placeholder"]
    assert dtype in [t.dtype for t in kept]
    assert torch.int64 not in [t.dtype for t in kept]
    for half in (parts.forward, parts.backward.graph):
        program = prepared(separate_outputs(lower(half).program), H200)
        plan = scheduled(program, Config(), H200, minimize_memory=True)
        check(program, plan)
        assert len(plan.kernels()) == 1
        assert not any(isinstance(step, ExternStep) for step in plan.steps)


def test_positions_that_are_returned_stay_as_they_are() -> None:
    x = torch.randn(1, 2, 16, 16, requires_grad=True)
    traced = trace(lambda x: F.max_pool2d(x.sin(), 3, 2, 1, return_indices=True), [x], training=True)
    assert not any("positions" in rule for rule, _ in rewrite(traced.graph, RULES, device="cuda").applied)
