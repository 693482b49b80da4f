"""Positions that data brings in Triton kernels: one out of range ends the kernel as eager's assertions do, where it counts. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from opforge.runtime.build.triton_job import Job, compile_job
from opforge.runtime.render.triton_unit import render_triton
from tests.support.ir_interpreter import interpret
from tests.support.loops import plan_of, program_of
from tests.support.triton_run import job_of, launch_interpreted, results
from tests.unit.render.test_checks import guarded, rows, taken, updated

Case = tuple[Callable[..., Any], list[torch.Tensor]]
X = torch.arange(11.0)
ENDS = torch.arange(37) % 11
CASES: dict[str, Case] = {
    "taken": (taken, [X, ENDS]),
    "rows": (rows, [X[:, None] + torch.arange(6), ENDS]),
    "updated": (updated, [X, ENDS, torch.arange(37.0)]),
    "guarded": (guarded, [X, torch.where(torch.arange(37) >= 20, 99, ENDS)]),
    "none": (taken, [X, ENDS[:0]]),
}


def test_positions_in_range() -> None:
    """At both ends, where the guard spares them, and in the rest of the last block."""
    plans = {name: plan_of(program_of(*case)) for name, case in CASES.items()}
    ran = launch_interpreted([job_of(plan, CASES[name][1]) for name, plan in plans.items()])
    for (name, plan), memory in zip(plans.items(), ran, strict=True):
        want = interpret(program_of(*CASES[name]), CASES[name][1])
        for got, exact in zip(results(plan, memory), want, strict=True):
            torch.testing.assert_close(got, exact.to(got.dtype), msg=name)


@pytest.mark.parametrize(("name", "bad"), [("taken", 11), ("updated", -1), ("guarded", 11)])
def test_position_out_of_range(name: str, bad: int) -> None:
    build, inputs = CASES[name]
    inputs = [t.clone() for t in inputs]
    inputs[1][19] = bad
    plan = plan_of(program_of(build, inputs))
    error, place = {
        "taken": ("IndexError", "taken: x[k]"),
        "updated": ("RuntimeError", "updated: base[k] += y"),
        "guarded": ("IndexError", "guarded"),
    }[name]
    with pytest.raises(AssertionError, match="IndexError") as raised:
        launch_interpreted([job_of(plan, inputs)])
    assert f"{error}: index out of range in {place}" in str(raised.value)


@pytest.mark.parametrize("name", ["taken", "rows", "updated", "guarded"])
def test_assertion_is_in_the_binary(name: str, tmp_path: Path) -> None:
    """With its message."""
    build, inputs = CASES[name]
    for (kernel,) in [render_triton(plan_of(program_of(build, inputs))).kernels.values()]:
        job = Job(kernel.name, kernel.source, kernel.pointers, 0, kernel.xblock, kernel.rblock, kernel.warps, 90)
        cubin = compile_job(job, tmp_path).cubin
        assert b"__assertfail" in cubin
        assert b"index out of range in " + name.encode() in cubin
