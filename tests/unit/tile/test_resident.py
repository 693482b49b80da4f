"""Long rows that several loops read: a part stays in registers. Needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from opforge.runtime.kernels.plan import Plan
from opforge.runtime.machine import tuning_of
from opforge.runtime.render.triton_unit import render_triton
from tests.support.accuracy import assert_as_accurate
from tests.support.gpu_plan import planned
from tests.support.triton_run import job_of, launch_interpreted, results

Case = tuple[Callable[..., Any], Callable[[], list[Tensor]]]


def standardized(x: Tensor) -> Tensor:
    """Three loops: the mean, what is left of it, and the result."""
    y = x - x.mean(-1, keepdim=True)
    return y / y.abs().amax(-1, keepdim=True)


CASES: dict[str, Case] = {
    "a row": (lambda x: F.log_softmax(x, -1), lambda: [torch.randn(3, 40000)]),
    "two rows": (lambda x, y: F.log_softmax(x + y, -1), lambda: [torch.randn(3, 20000), torch.randn(3, 20000)]),
    "one of two rows": (
        lambda x, y: F.softmax(x, -1) * y.tanh(),
        lambda: [torch.randn(3, 20000), torch.randn(3, 20000).bfloat16().float()],
    ),
    "a row of doubles": (lambda x: F.log_softmax(x, -1), lambda: [torch.randn(3, 20001).double()]),
    "three loops": (standardized, lambda: [torch.randn(3, 33000)]),
    "a group of channels": (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        lambda: [torch.randn(2, 6, 100, 101), torch.randn(6), torch.randn(6)],
    ),
    "a row by two views": (
        lambda x: F.softmax(x.view(8, 16500)[2:].reshape(3, 33000) * 2 - x[1:], -1),
        lambda: [torch.randn(4, 33000)],
    ),
    "two rows of one": (
        lambda x: F.log_softmax(x[:-1] * 1.5 + x[1:], -1),
        lambda: [torch.randn(33000).expand(4, 33000)],
    ),
    "every other element": (lambda x: F.log_softmax(x[:, ::2], -1), lambda: [torch.randn(3, 66004)]),
}


def source(plan: Plan) -> str:
    return render_triton(plan).source


@pytest.mark.parametrize("name", CASES)
def test_right(name: str) -> None:
    """Beside eager and a float64 run. Few processors, so that few rows, which the interpreter has time for, are not cut into parts."""
    torch.manual_seed(0)
    fn, make = CASES[name]
    inputs = make()
    plan = planned(fn, inputs, num_sms=1)
    assert "resident0[roffset // RBLOCK]" in source(plan)
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    eager, exact = fn(*inputs), fn(*wide)
    (memory,) = launch_interpreted([job_of(plan, inputs)])
    (found,) = results(plan, memory)
    if eager.dtype == torch.float64:
        torch.testing.assert_close(found, eager, rtol=1e-14, atol=1e-14)  # no run is nearer to the truth than eager's
    else:
        assert_as_accurate(found, eager, exact)


def test_what_is_resident() -> None:
    """As many tiles as the table has registers for; what the cache has is read again."""
    text = source(planned(lambda x: F.log_softmax(x, -1), [torch.empty(270, 40000)]))
    assert text.count("tl.static_range(0, 40000, RBLOCK)") == 2
    assert 'eviction_policy="evict_first" if roffset < 32768 else "evict_last"' in text
    assert "resident0[roffset // RBLOCK] if roffset < 32768 else tl.load(" in text
    doubles = source(planned(lambda x: F.log_softmax(x, -1), [torch.empty(270, 20000, dtype=torch.float64)]))
    assert "if roffset < 16384 else" in doubles
    two = source(planned(lambda x, y: (x + y).log_softmax(-1), [torch.empty(270, 20000), torch.empty(270, 20000)]))
    steps = re.findall(r"(resident\d)\[roffset // RBLOCK\] if roffset < (\d+)", two)
    assert steps == [("resident0", "20480"), ("resident1", "12288")]


def test_what_is_not_resident() -> None:
    none = ("static_range", "resident0")
    longer = source(planned(lambda x: F.log_softmax(x, -1), [torch.empty(270, 70000)]))
    once = source(planned(lambda x: x.argmax(-1), [torch.empty(270, 50304)]))
    halves = source(planned(lambda x: F.log_softmax(x, -1), [torch.empty(270, 50304, dtype=torch.bfloat16)]))
    table = replace(tuning_of(), rules=tuning_of().rules | {
        "multi_pass_reduction": tuple(replace(r, resident=0) for r in tuning_of().rules["multi_pass_reduction"])
    })  # fmt: skip
    plan = planned(lambda x: F.log_softmax(x, -1), [torch.empty(270, 50304)])
    assert not any(
        word in text for text in (longer, once, halves, render_triton(plan, tuning=table).source) for word in none
    )
