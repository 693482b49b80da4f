"""Values that are stored and read by other operations: kernels that Triton's layout conversions broke. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opforge.runtime.render.triton import render_kernel

pytest.importorskip("triton")

from tests.support.gpu_plan import planned
from tests.support.triton_run import compile_sm90, job_of, launch_interpreted, results


def softmax_of_one(x: Tensor) -> tuple[Tensor, ...]:
    """The mean is stored between two values that are made of it."""
    mean = x.square().mean()
    total = mean.logsumexp(-1, keepdim=True)
    return total, mean.flatten(), torch.exp(mean - total)


def position(x: Tensor, table: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The mean is stored between a load at a position that is made of it and another value."""
    mean = x.mean((-2, -1), keepdim=True)
    at = mean.abs().round().long().clamp(max=8).sum(-1).remainder(9)
    return mean * 1, torch.nn.functional.embedding(at, table), torch.nn.functional.prelu(mean, weight)


def rows(x: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """Rows of 16-bit values: the rounded total is what is stored."""
    total = x.sum(-1, keepdim=True)
    found = table[total.abs().round().long().clamp(max=8)][..., 0]
    both = found + total
    return found.view(-1), total.view(-1), both.view(-1), torch.maximum(x, both), torch.maximum(x, both).t().clone()


def counted(x: Tensor) -> tuple[Tensor, ...]:
    """Booleans and integers."""
    top = x.argmax(-1)
    odd = top % 2 == 1
    return torch.where(odd, top * 3, top), top, odd, (x.sum(-1) + top) * odd


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "one": (softmax_of_one, [rand(33, 2)]),
    "position": (position, [rand(1, 4, 8).double(), rand(9, 1).double(), rand(1).double()]),
    "rows": (rows, [rand(33, 40, dtype=torch.bfloat16), rand(9, 1, dtype=torch.bfloat16)]),
    "counted": (counted, [rand(33, 40)]),
}


@pytest.mark.parametrize("warps", [1, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_compiles_for_sm90(name: str, warps: int) -> None:
    """RuntimeError: PassManager::run failed."""
    plan = planned(*CASES[name])
    for k in plan.kernels():
        assert compile_sm90(k, plan.layouts, warps=warps)[:4] == b"\x7fELF"


def test_values() -> None:
    plans = [planned(f, given) for f, given in CASES.values()]
    memories = launch_interpreted([job_of(plan, c[1]) for plan, c in zip(plans, CASES.values(), strict=True)])
    for plan, memory, (f, given) in zip(plans, memories, CASES.values(), strict=True):
        for got, want in zip(results(plan, memory), f(*given), strict=True):
            torch.testing.assert_close(got.to(want.dtype), want)


def test_only_what_other_operations_read_is_stored_apart() -> None:
    plan = planned(lambda x: (x.sum(-1), (m := x.amax(-1)), m * 2), [rand(33, 40)])
    (kernel,) = plan.kernels()
    assert render_kernel(kernel, plan.layouts).count("tp.apart(") == 1
