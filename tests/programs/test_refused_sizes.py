"""Sizes that eager's kernels refuse and fake kernels take, known when the graph is made or symbols: the compiled program raises the same type, and
reads nothing that is not there. The calls that are right are answered, by kernels of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opforge

Program = Callable[..., Any]
FLAT = {"bilinear": 2, "bicubic": 2, "nearest": 2, "nearest-exact": 2, "linear": 1, "trilinear": 3}


def resized(mode: str) -> Program:
    return lambda x: F.interpolate(x, size=[4] * FLAT[mode], mode=mode)


def assigned(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
    y = x * 1
    y[i] = v
    return y


def put(x: Tensor, i: Tensor, v: Tensor, accumulate: bool = False) -> Tensor:
    return torch.index_put(x, (i,), v, accumulate)


def reduced(kind: str) -> Program:
    return lambda x, i, s: torch.index_reduce(x, 0, i, s, kind)


def runs(x: Tensor, offsets: Tensor) -> Tensor:
    return torch.segment_reduce(x, "max", offsets=offsets)


def losses(x: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(x, target, reduction="none")


def product(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(bias, a, b, beta=0)


ONE, THREE = torch.tensor([1]), torch.tensor([1, 0, 2])
REFUSED: dict[str, tuple[Program, tuple[Tensor, ...]]] = {
    **{f"{m} of nothing": (resized(m), (torch.zeros(1, 2, 0, *[5] * (n - 1)),)) for m, n in FLAT.items()},
    **{f"{m} of no channels": (resized(m), (torch.zeros(2, 0, *[3] * n),)) for m, n in FLAT.items()},
    "put too many columns": (put, (torch.zeros(2, 4), ONE, torch.ones(3))),
    "put too few rows": (put, (torch.zeros(5, 4), THREE, torch.ones(2, 1))),
    "put too many rows": (put, (torch.zeros(5, 4), THREE, torch.ones(7, 4))),
    "add too few rows": (lambda *a: put(*a, True), (torch.zeros(5, 4), THREE, torch.ones(2, 4))),
    "assigned too few rows": (assigned, (torch.zeros(3000, 4), torch.arange(3000), torch.ones(2, 4))),
    **{f"{k} of too few": (reduced(k), (torch.ones(2, 2), ONE, torch.ones(2, 2))) for k in ("prod", "amax", "mean")},
    "prod of narrow rows": (reduced("prod"), (torch.ones(3, 2), THREE, torch.ones(3, 1))),
    "amin of wide rows": (reduced("amin"), (torch.ones(3, 2), THREE, torch.ones(3, 700))),
    "a place in a number": (torch.searchsorted, (torch.tensor(1.0), torch.tensor([0.0, 2.0]))),
    "losses of other rows": (losses, (torch.zeros(2, 3, 2, 2), torch.zeros(2, 2, 1, dtype=torch.int64))),
    "pool of nothing": (lambda x: F.adaptive_avg_pool2d(x, 2), (torch.zeros(1, 2, 0, 5),)),
    "volume of nothing": (lambda x: F.adaptive_avg_pool3d(x, 2), (torch.zeros(1, 2, 3, 0, 5),)),
    "area of nothing": (lambda x: F.interpolate(x, size=(2, 2), mode="area"), (torch.zeros(1, 2, 0, 5),)),
    "descending offsets": (runs, (torch.arange(5.0), torch.tensor([0, 4, 2, 5]))),
    "a bias that is not read": (product, (torch.zeros(3), torch.ones(2, 3), torch.ones(3, 4))),
}
TAKEN: dict[str, tuple[Program, tuple[Tensor, ...]]] = {
    "put rows": (put, (torch.zeros(5, 4), THREE, torch.randn(3, 4))),
    "put one row": (put, (torch.zeros(5, 4), THREE, torch.randn(4))),
    "put columns": (put, (torch.zeros(5, 4), THREE, torch.randn(3, 1))),
    "assigned": (assigned, (torch.zeros(5, 4), THREE, torch.randn(3, 4))),
    "prod": (reduced("prod"), (torch.ones(3, 2), THREE, torch.randn(3, 2))),
    "offsets": (runs, (torch.arange(5.0), torch.tensor([0, 2, 2, 5]))),
    "losses": (losses, (torch.randn(2, 3, 2, 5), torch.zeros(2, 2, 5, dtype=torch.int64))),
    "resized": (resized("bilinear"), (torch.randn(2, 3, 5, 7),)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_by_eager(name: str, dynamic: bool | None) -> None:
    program, args = REFUSED[name]
    with pytest.raises((RuntimeError, IndexError)) as eager:
        program(*args)
    torch._dynamo.reset()
    with pytest.raises(type(eager.value)):
        torch.compile(program, backend="opforge", dynamic=dynamic)(*args)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", TAKEN)
def test_right_calls_are_answered(name: str, dynamic: bool | None) -> None:
    program, args = TAKEN[name]
    torch._dynamo.reset()
    opforge.reset_stats()
    torch.testing.assert_close(torch.compile(program, backend="opforge", dynamic=dynamic)(*args), program(*args))
    assert not opforge.stats()["fallbacks"]
    assert dynamic or not opforge.stats()["reasons"]


def test_other_sizes_later_are_refused_too() -> None:
    """The second call makes the sizes symbols."""
    torch._dynamo.reset()
    compiled = torch.compile(assigned, backend="opforge")
    compiled(torch.zeros(4, 5), torch.arange(3), torch.ones(3, 5))
    with pytest.raises(RuntimeError):
        compiled(torch.zeros(6, 9), torch.arange(4), torch.ones(2, 9))
    assert torch.equal(compiled(torch.zeros(6, 9), torch.arange(4), torch.ones(4, 9))[:4], torch.ones(4, 9))
