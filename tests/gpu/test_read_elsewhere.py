"""Values of a row that the same kernel reads at other points of it, where a barrier or a second computation stands for a tile: the same to the bit in
every launch (a missing barrier is a race), judged by a float64 run. `make test-gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import opforge
from tests.support import row_programs as rows
from tests.support.compiled import compiled

pytestmark = pytest.mark.gpu

LAUNCHES = 200
PROGRAMS: dict[str, tuple[Callable[[Tensor], rows.Result], tuple[int, int], int | None]] = {
    # The program, its rows and their width, and how many kernels it is where that is the point.
    "a norm": (rows.turned, (600, 40), 1),
    "of wide rows": (rows.turned, (600, 3000), 1),
    "in parts": (rows.turned, (600, 33000), 1),
    "softmax": (lambda x: torch.softmax(x, 1).flip(1), (600, 1000), 1),
    "turned twice": (lambda x: rows.turned(rows.turned(x)), (600, 300), 1),
    "a running sum": (rows.running, (600, 40), 1),
    "a longer running sum": (rows.running, (600, 1500), 1),
    "padded": (rows.padded, (600, 40), 1),
    "read by others": (rows.and_a_gradient, (600, 40), 1),
    "read by others in wide rows": (rows.and_a_gradient, (600, 3000), 1),
}


def several(result: rows.Result) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def judge(f: Callable[..., rows.Result], inputs: list[Tensor], folder: Path) -> None:
    run = compiled(f, folder)
    got, eager = several(run(*inputs)), several(f(*inputs))
    exact = several(f(*(t.double() if t.is_floating_point() else t for t in inputs)))
    for y, e, x in zip(got, eager, exact, strict=True):
        room = 2 * torch.finfo(y.dtype).eps * float(x.abs().max())
        assert float((y - x).abs().max()) <= 2 * float((e - x).abs().max()) + room
    want = [y.clone() for y in got]
    for _ in range(LAUNCHES):
        for y, first in zip(several(run(*inputs)), want, strict=True):
            assert torch.equal(y, first)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_launch_gives_the_same(name: str, tmp_path: Path) -> None:
    f, shape, kernels = PROGRAMS[name]
    torch.manual_seed(0)
    judge(f, [torch.randn(shape, device="cuda")], tmp_path)
    assert opforge.stats()["retries"] == {}
    assert kernels is None or opforge.stats()["kernels"] == kernels


def test_running_sums_in_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    judge(rows.sums_in_memory, [torch.randn(600, 9000, device="cuda") for _ in range(5)], tmp_path)
    assert opforge.stats()["retries"] == {}
    assert opforge.stats()["kernels"] == 1


def test_places_that_data_brings(tmp_path: Path) -> None:
    """Places are bounded by the width, not by the part of a row that reads them: a check without the condition would refuse them."""
    torch.manual_seed(0)
    judge(rows.picked_beside, [torch.randn(600, 40, device="cuda"), torch.randperm(40, device="cuda")], tmp_path)
    assert opforge.stats()["retries"] == {}


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    judge(rows.at_random(seed), [torch.randn(600, 40, device="cuda")], tmp_path)
    assert opforge.stats()["retries"] == {}


def test_a_gradient_through_time(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(s, device="cuda") / 4 for s in ((8, 20, 32), (32, 32), (32, 32), (32,))]
    judge(torch.func.grad(rows.cells, (0, 1, 2, 3)), inputs, tmp_path)
    assert opforge.stats()["retries"] == {}
