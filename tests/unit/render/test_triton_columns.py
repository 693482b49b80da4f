"""Kernels of sums over columns, and of inputs that are the same along a kernel's inner loops. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from opforge.runtime.build.triton_job import compile_job
from opforge.runtime.kernels.plan import Plan
from opforge.runtime.render.triton_unit import TritonUnit, render_triton
from opforge.runtime.targets.cuda import job_of as compiler_job
from tests.support.accuracy import assert_as_accurate
from tests.support.gpu_plan import planned
from tests.support.triton_run import job_of, launch_interpreted, results

Case = tuple[Callable[..., Any], Callable[[], list[Tensor]]]


def images(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16().to(memory_format=torch.channels_last)


def normalized(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5).relu()


def gradients(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor) -> Any:
    return torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, None, None, mean, inverse, True, 1e-5, [True, True, True]
    )


CASES: dict[str, Case] = {
    "normalized": (normalized, lambda: [images(24, 64, 32, 32), torch.randn(64), torch.randn(64)]),
    "normalized far from zero": (
        normalized,
        lambda: [100 + images(24, 64, 32, 32), torch.randn(64), torch.randn(64)],
    ),
    "gradients": (
        gradients,
        lambda: [
            images(24, 64, 32, 32),
            images(24, 64, 32, 32),
            torch.randn(64),
            torch.randn(64) / 100,
            torch.rand(64) + 1,
        ],
    ),
    "one factor for a row": (lambda x, w: (x * w).sum(-1), lambda: [torch.randn(4000, 30), torch.randn(1).expand(30)]),
    "one weight of a norm": (
        lambda x, w: F.layer_norm(x, (30,), w),
        lambda: [torch.randn(4000, 30), torch.randn(1).expand(30)],
    ),
    "one factor for a column": (
        lambda x, w: (x * w).sum(0),
        lambda: [torch.randn(400, 30), torch.randn(1, 1).expand(400, 1)],
    ),
    "one mask for a row": (
        lambda x, m: x.masked_fill(m, 0.0).amax(-1),
        lambda: [torch.randn(4000, 30), torch.tensor([True]).expand(30)],
    ),
    "numbers below the least normal": (
        lambda x: x.float() * 2,
        lambda: [torch.tensor([1.001e-38, 9.18e-41, -2e-39, 0.0]).bfloat16()],
    ),
    "one row for all, at positions": (
        lambda x: x[:, torch.arange(161) * 3 % 161].sin() + x[:, :1],
        lambda: [torch.randn(1, 161).expand(2, 161)],
    ),
}
NUM_SMS = 4


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[Plan, TritonUnit, list[Tensor]]]:
    torch.manual_seed(0)
    found = {}
    for name, (fn, make) in CASES.items():
        inputs = make()
        plan = planned(fn, inputs, NUM_SMS)
        found[name] = plan, render_triton(plan), inputs
    return found


@pytest.fixture(scope="module")
def memories(made: dict[str, Any]) -> dict[str, Any]:
    ran = launch_interpreted([job_of(plan, inputs) for plan, _, inputs in made.values()])
    return dict(zip(made, ran, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_results(made: dict[str, Any], memories: dict[str, Any], name: str) -> None:
    plan, _, inputs = made[name]
    with torch.no_grad():
        want = CASES[name][0](*inputs)
        exact = CASES[name][0](*(t.double() if t.is_floating_point() else t for t in inputs))
    wanted, right = (r if isinstance(r, tuple) else (r,) for r in (want, exact))
    for got, eager, truth in zip(results(plan, memories[name]), wanted, right, strict=True):
        assert_as_accurate(got, eager, truth)


@pytest.mark.parametrize("name", CASES)
def test_compiles(made: dict[str, Any], name: str, tmp_path: Path) -> None:
    for kernel in made[name][1].kernels.values():
        compile_job(compiler_job(kernel, 90), tmp_path)


@pytest.mark.parametrize("name", ["normalized", "gradients"])
def test_long_columns_are_met_in_one_loop(made: dict[str, Any], name: str) -> None:
    """In a tile of whole columns their sums wait for each other: batch norms of 256 channels took 35 µs on an H200, in a loop 27."""
    *sums, points = (k.source for k in made[name][1].kernels.values())
    assert sums[0].count("for roffset in range") == 1
    # What is divided out of sums is so once for a channel, not for each of its elements.
    assert "tp.div(" not in points
    assert "tp.rsqrt(" not in points
    assert "tp.div(" in sums[-1]
