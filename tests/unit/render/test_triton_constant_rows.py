"""Statistics of rows whose elements are all the same, or nearly, by the kernels of a GPU: as in `tests/programs/test_constant_rows.py`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from opforge.runtime.kernels.plan import Plan
from opforge.runtime.render.triton_unit import render_triton
from tests.support.triton_run import job_of, launch_interpreted, results

from .test_triton_programs import planned

Program = Callable[[Tensor], Tensor | tuple[Tensor, ...]]


def batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


# In registers; in steps, by sums that keep up with the mean; in parts, by several programs.
PROGRAMS: dict[str, tuple[Program, tuple[int, ...]]] = {
    "layer norm": (lambda x: F.layer_norm(x, x.shape[-1:]), (3, 1025)),
    "layer norm of long rows": (lambda x: F.layer_norm(x, x.shape[-1:]), (3, 40001)),
    "group norm": (lambda x: F.group_norm(x, 2), (2, 4, 7, 1201)),
    "batch norm": (batch_norm, (4, 6, 10, 11)),
    "batch norm of many images": (batch_norm, (160, 2, 15, 15)),
    "variance": (lambda x: torch.var_mean(x, -1), (3, 1025)),
    "variance of long rows": (lambda x: torch.var_mean(x, -1, correction=0), (3, 40001)),
}
VALUES = (3.3, 33333.3, 1.5e30)


def rows(value: float, shape: tuple[int, ...]) -> Tensor:
    """All the same; of 0, one step of float32 apart around a thousand."""
    if value:
        return torch.full(shape, value)
    return 1000 + torch.randint(2, shape, generator=torch.Generator().manual_seed(0)) * 2.0**-14


CASES = {
    f"{name}, {value}": (name, rows(value, PROGRAMS[name][1])) for name, value in product(PROGRAMS, (*VALUES, 0.0))
}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {case: planned(PROGRAMS[name][0], [x]) for case, (name, x) in CASES.items()}


@pytest.fixture(scope="module")
def found(plans: dict[str, Plan]) -> dict[str, list[Tensor]]:
    memories = launch_interpreted([job_of(plan, [CASES[case][1]]) for case, plan in plans.items()])
    return {case: results(plan, memory) for (case, plan), memory in zip(plans.items(), memories, strict=True)}


def seen(program: Program, x: Tensor) -> tuple[Tensor, ...]:
    result = program(x)
    return (result,) if isinstance(result, Tensor) else result


@pytest.mark.parametrize("case", CASES)
def test_as_near_as_eager(found: dict[str, list[Tensor]], case: str) -> None:
    name, x = CASES[case]
    program = PROGRAMS[name][0]
    for mine, eager, true in zip(found[case], seen(program, x), seen(program, x.double()), strict=True):
        # Beside eager's own error, which may be nan, a few roundings of the result.
        slack = 4 * torch.finfo(torch.float32).eps * true.abs() + 1e-6
        if (
            case.endswith(" 0.0") and "norm" in name
        ):  # no mean in float32 lies between two neighbours; it is divided by 1e-5 ** 0.5 at least
            slack = slack + 2.0**-15 / 1e-5**0.5
        own = (eager - true).abs().nan_to_num(torch.inf).max()
        assert bool(((mine.double() - true).abs() <= 2 * own + slack).all()), (own, (mine - true).abs().max())


@pytest.mark.parametrize("name", ["layer norm of long rows", "batch norm of many images"])
def test_statistics_take_one_pass(plans: dict[str, Plan], name: str) -> None:
    """What the mean's rounding leaves comes of the means that the squares keep; a second kernel normalizes."""
    plan = plans[f"{name}, {VALUES[0]}"]
    first, second = [kernel.source for kernel in render_triton(plan).kernels.values()]
    assert first.count("for roffset in") == 1
    assert first.count("tp.online_apart_total(") == 1
    assert second.count("tl.load(") == 3
