"""A value that its readers need in parts is computed by them: stored, it would be written and read for nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opforge
from opforge.runtime.compile_fx import HISTORY
from opforge.runtime.kernels.plan import KernelStep, Plan
from tests.support.accuracy import assert_as_accurate
from tests.support.gpu_plan import planned


def gates(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = torch.tanh(a + b).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def halves(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return F.glu(torch.tanh(a + b), -1) * c[:, :16].repeat(1, 4)


def evens(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = torch.tanh(a + b)
    return x[:, ::2] * x[:, 1::2] + c[:, :1]


def overlapping(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = torch.tanh((a + b).sin().exp())
    return x[:, 1:] * x[:, :-1] + c[:, :1]


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(16, 128), torch.randn(16, 128), torch.randn(16, 32)]


def kernels(plan: Plan) -> int:
    return sum(isinstance(s, KernelStep) for s in plan.steps)


@pytest.mark.parametrize("fn", [gates, halves, evens])
def test_parts_are_one_kernel(fn: Callable[..., Any]) -> None:
    assert kernels(planned(fn, inputs())) == 1


@pytest.mark.parametrize("fn", [gates, halves, evens, overlapping])
def test_right(fn: Callable[..., Any]) -> None:
    given = inputs()
    found = torch.compile(fn, backend="opforge", options={"strict": True})(*given)
    eager, exact = fn(*given), fn(*(t.double() for t in given))
    for f, e, x in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, eager, exact)), strict=True):
        assert_as_accurate(f, e, x)


def test_one_kernel_on_a_processor_too() -> None:
    opforge.reset_stats()
    torch.compile(gates, backend="opforge", dynamic=False)(*inputs())
    assert opforge.stats()["kernels"] == 1


def test_a_chain_of_halves_stays_short() -> None:
    """Each level doubles the readings of all levels before it, were none of them stored."""

    def chain(x: Tensor) -> Tensor:
        for _ in range(11):
            x = F.glu(torch.tanh(x * 1.3 + 0.1), -1)
        return x

    torch.manual_seed(0)
    plan = planned(chain, [torch.randn(1, 4096)])
    assert kernels(plan) > 3
    assert max(len(str(k)) for k in plan.kernels()) < 10_000


def test_an_indexed_update_may_read_all_of_it() -> None:
    def update(a: Tensor, b: Tensor, k: Tensor) -> Tensor:
        x = torch.tanh((a + b).sin())
        return a.new_zeros(16, 128).index_add(0, k, x) + x

    k = torch.tensor([3, 1, 3, 0, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15])
    given = inputs()[:2]
    found = torch.compile(update, backend="opforge")(*given, k)
    assert_as_accurate(found, update(*given, k), update(*(t.double() for t in given), k))


def test_one_element_of_each_row_is_computed_by_its_reader(tmp_path: Path) -> None:
    """On a processor too, where the other readers of the rows have them in registers."""

    def fn(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        y = x.log_softmax(-1)
        return (y.exp() * y).sum(-1), y.gather(1, at)

    x, at = torch.randn(64, 300), torch.randint(0, 300, (64, 1))
    run = torch.compile(fn, backend="opforge", options={"strict": True, "cache_dir": str(tmp_path)})
    with torch.no_grad():
        for found, eager, exact in zip(run(x, at), fn(x, at), fn(x.double(), at), strict=True):
            assert_as_accurate(found, eager, exact)
    plan = HISTORY[-1].plan
    assert all(
        math.prod(b.shape) < 64 * 300 for name, b in plan.layouts.items() if plan.allocations[name].kind != "input"
    )
