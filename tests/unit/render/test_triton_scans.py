"""Running results on a GPU stay in registers: what reads them elsewhere, or has rows too long, is another kernel. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import opforge
from opforge.errors import UnsupportedError
from opforge.runtime.render import cpp_unit as unit
from opforge.runtime.render.triton_unit import render_triton
from tests.support.gpu_plan import planned
from tests.support.triton_run import Job, job_of, launch_interpreted, results

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "backward of a sum": lambda x: x.flip(-1).cumsum(-1).flip(-1),
    "a function of it": lambda x: x.cumsum(-1).sin(),
    "its share": lambda x: x.cumsum(-1) / (1 + x.cumsum(-1).abs().sum(-1, keepdim=True)),
    "another one of it": lambda x: x.cumsum(-1).sin().cumsum(-1) + 1,
    "down columns": lambda x: x.cumsum(0).sin(),
}


@pytest.mark.parametrize("columns", [5, 20000, 70000])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_plan_can_be_said(name: str, columns: int) -> None:
    """The backward of `cumsum`, and rows of 16384 to 32768 elements, sent whole graphs to eager."""
    render_triton(planned(PROGRAMS[name], [torch.randn(300 if name == "down columns" else 4, columns)]))


def test_short_rows_are_one_kernel() -> None:
    assert len(planned(PROGRAMS["a function of it"], [torch.randn(4, 3000)]).kernels()) == 1
    assert len(planned(PROGRAMS["backward of a sum"], [torch.randn(4, 3000)]).kernels()) == 2


def test_their_values() -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    x = torch.randn(9, 37)
    plans = {name: planned(f, [x]) for name, f in PROGRAMS.items()}
    jobs: list[Job] = [job_of(plan, [x]) for plan in plans.values()]
    for (name, plan), memory in zip(plans.items(), launch_interpreted(jobs), strict=True):
        (found,) = results(plan, memory)
        exact = PROGRAMS[name](x.double())
        # Eager's kernel of a processor adds up in float64, a GPU's in float32: six levels of roundings for 37 elements, two scans in one program.
        bound = max(1e-5, 4 * torch.finfo(torch.float32).eps * float(exact.abs().max()))
        assert float((found - exact).abs().max()) <= bound, name


def test_what_a_target_cannot_say_is_left_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(plan: object, target: object, **kwargs: object) -> object:
        raise UnsupportedError("too much at once")

    monkeypatch.setattr(unit, "render_unit", refuses)
    x = torch.randn(6, 7)
    torch._dynamo.reset()
    opforge.reset_stats()
    program = lambda x: (x - x.mean(1, keepdim=True)).cumsum(1) + 2.25  # noqa: E731 - not in the cache
    torch.testing.assert_close(torch.compile(program, backend="opforge")(x), program(x))
    stats = opforge.stats()
    assert stats["retries"] == {}
    assert stats["fallbacks"] == {"UnsupportedError: too much at once": 1}
