"""Sums of gathered rows as Triton kernels: a loop over the rows, whose neighbours are the threads'. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.tile.launch import launch

pytest.importorskip("triton")

from tests.support.gpu_plan import planned
from tests.support.triton_run import compile_sm90, handed_on, job_of, launch_interpreted, results


def summed(i: Tensor, w: Tensor) -> Tensor:
    return F.embedding(i, w).sum(1)


def mean(i: Tensor, w: Tensor) -> Tensor:
    return F.embedding(i, w).mean(1) * 2 + 1


def weighted(i: Tensor, w: Tensor) -> Tensor:
    return (w[i] * (i % 3)[..., None]).sum(1)


def greatest(i: Tensor, w: Tensor) -> Tensor:
    return w[i].amax(1)


def given(bags: int, rows: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rng = torch.Generator().manual_seed(width)
    return [torch.randint(0, 50, (bags, rows), generator=rng), torch.randn(50, width, generator=rng).to(dtype)]


CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "sum": (summed, given(33, 20, 64)),
    "mean": (mean, given(33, 20, 64)),
    "odd width": (summed, given(7, 5, 33)),
    "bfloat16": (summed, given(20, 32, 128, torch.bfloat16)),
    "weighted": (weighted, given(20, 10, 40)),
    "greatest": (greatest, given(20, 10, 40)),
}


def test_values_are_eagers() -> None:
    plans = {name: planned(f, inputs) for name, (f, inputs) in CASES.items()}
    jobs = [replace(job_of(plan, CASES[name][1]), tile=(64, 1)) for name, plan in plans.items()]
    for (name, plan), memory in zip(plans.items(), launch_interpreted(jobs), strict=True):
        f, inputs = CASES[name]
        torch.testing.assert_close(results(plan, memory)[0], f(*inputs), msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", CASES)
def test_one_row_at_a_time(name: str) -> None:
    plan = planned(*CASES[name])
    *_, k = plan.kernels()
    unit = render_triton(plan)
    made = unit.kernels[unit.symbols[k.name]]
    assert launch(k, plan.layouts).gathers
    assert made.rblock == 1
    assert "tl.static_range" in made.source
    assert compile_sm90(k, plan.layouts)[:4] == b"\x7fELF"


def test_long_sums_are_as_accurate_as_before() -> None:
    plan = planned(summed, given(20, 500, 64))
    assert not any(launch(k, plan.layouts).gathers for k in plan.kernels())


def test_sums_are_as_accurate_as_eagers() -> None:
    inputs = [torch.randint(0, 50, (60, 64), generator=torch.Generator().manual_seed(3)), given(1, 1, 128)[1]]
    plan = planned(summed, inputs)
    assert any(launch(k, plan.layouts).gathers for k in plan.kernels())
    (memory,) = launch_interpreted([replace(job_of(plan, inputs), tile=(64, 1))])
    exact = summed(inputs[0], inputs[1].double())
    mine, eager = ((t.double() - exact).norm() for t in (results(plan, memory)[0], summed(*inputs)))
    assert mine <= eager


def test_accumulators_are_not_handed_on() -> None:
    """Four that were handed on in a ring summed one row of 32 on a GPU, and all of them in the interpreter."""
    assert handed_on("a = b = 0\nfor k in range(9):\n    a, b = b, a + k") == ["a, b = (b, a + k)"]
    assert not handed_on("a = c = 0\nfor k in range(9):\n    a = tl.where(m, a + k, a)\n    b = c")
    for f, inputs in CASES.values():
        assert not any(handed_on(k.source) for k in render_triton(planned(f, inputs)).kernels.values())
