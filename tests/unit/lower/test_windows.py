"""Reductions over windows, written out: the same values; and what stays as it is."""

from __future__ import annotations

from typing import Any

import torch

from opforge.runtime.dispatch.trace import trace
from opforge.runtime.ir.nodes import Nest
from opforge.runtime.ir.verify import verify
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.split.windows import write_out_windows
from tests.support.ir_interpreter import interpret
from tests.support.loops import plan_of, program_of, reduce
from tests.unit.render.test_cpp import max_pool


def test_same_values() -> None:
    x = torch.randn(3, 10, 12)
    x[1, 4, 4] = float("nan")
    program = program_of(max_pool, [x])
    out = write_out_windows(program)
    verify(out)
    assert not any(isinstance(i, Nest) and i.reduce for i in out.items)
    for got, want in zip(interpret(out, [x]), interpret(program, [x]), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    plan_of(out)  # checks the plan


def test_what_stays() -> None:
    def reductions(build: Any, x: torch.Tensor) -> list[str | None]:
        return [i.reduce for i in write_out_windows(program_of(build, [x])).items if isinstance(i, Nest) and i.reduce]

    assert reductions(lambda b, x: reduce(b, "sum", x, 1), torch.rand(64, 4)) == ["sum"]  # rows
    wide = torch.rand(3, 40)
    assert reductions(lambda b, x: window(b, x, 20), wide) == ["sum"]  # too many to write out
    assert reductions(lambda b, x: window(b, x, 3), wide) == []


def window(b: Any, x: Any, size: int) -> Any:
    shape = (x.shape[0], x.shape[1] - size + 1)
    i, r = b.coords(shape), b.rcoords((size,))
    return b.reduce("sum", shape, r, b.at(x, [i[0], i[1] + r[0]]))


def test_windows_of_views_that_give_positions() -> None:
    """Greatest elements and where they are: one kernel of independent points."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])

    x = torch.randint(0, 5, (2, 3, 9, 8)).float()
    x[1, 2, 4, 4] = float("nan")
    program = lower(trace(run, [x]).graph).program
    out = write_out_windows(program)
    verify(out)
    assert not any(isinstance(i, Nest) and i.reduce for i in out.items)
    for got, want in zip(interpret(out, [x]), run(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_rows_that_lie_apart_are_no_window() -> None:
    """A sum over the batch of what a flattened tensor gives: each value is made by one kernel, not by each of its terms."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + x.sin()).view(4, 8, 3).sum(0)

    program = lower(trace(run, [torch.rand(32, 3)]).graph).program
    assert [i.reduce for i in write_out_windows(program).items if isinstance(i, Nest) and i.reduce] == ["sum"]
