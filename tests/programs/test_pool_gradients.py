"""Gradients of max pools: each element looks at the positions of the windows around it. Beside eager and float64."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import opforge

Pool = Callable[[Tensor], Tensor]


def ties(*shape: int) -> Tensor:
    """Few different values: many windows have several greatest ones."""
    torch.manual_seed(0)
    return torch.randint(0, 3, shape).float()


def special(*shape: int) -> Tensor:
    x = ties(*shape)
    flat = x.view(-1)
    flat[::7], flat[3::11] = nan, -inf
    x[0, 0] = -inf
    return x


def check(f: Pool, x: Tensor) -> None:
    """Results and gradients as eager's, up to the order in which the windows of an element are added up; layouts and dtypes too."""
    torch._dynamo.reset()
    opforge.reset_stats()
    ours, eager = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    wide = x.detach().double().requires_grad_()
    got, want = torch.compile(f, backend="opforge", options={"strict": True})(ours), f(eager)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    grad = torch.randn_like(want)
    got.backward(grad)
    want.backward(grad)
    f(wide).backward(grad.double())
    assert ours.grad is not None
    assert eager.grad is not None
    assert wide.grad is not None
    assert (ours.grad.dtype, ours.grad.stride()) == (eager.grad.dtype, eager.grad.stride())
    if x.numel():
        error = float((ours.grad.double() - wide.grad).abs().max())
        least = torch.finfo(x.dtype).eps * float(wide.grad.abs().max())
        assert error <= max(2 * float((eager.grad.double() - wide.grad).abs().max()), least)
    assert not any("max_pool" in name for name in opforge.stats()["externs"])


WINDOWS: dict[str, tuple[Any, ...]] = {
    "overlapping": (3, 2, 1),
    "of each element": (3, 1, 1),
    "side by side": (2, 2),
    "with gaps": (2, 3),
    "dilated": ((3, 2), 1, (1, 0), (2, 1)),
    "dilated and apart": (2, 3, 1, 2),
    "beyond the border": ((3, 2), (2, 3), (1, 1), (1, 1), True),
    "large": (5, 1, 2),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("make", [ties, special])
def test_windows(name: str, make: Callable[..., Tensor]) -> None:
    check(lambda x: F.max_pool2d(x, *WINDOWS[name]), make(2, 3, 11, 9))


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "channels last": lambda: ties(2, 5, 8, 9).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: ties(2, 3, 9, 8).transpose(2, 3),
    "one image": lambda: ties(3, 9, 8),
    "no image": lambda: ties(0, 3, 9, 8),
    "bfloat16": lambda: ties(2, 3, 9, 8).bfloat16(),
    "float64": lambda: ties(2, 3, 9, 8).double(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    check(lambda x: F.max_pool2d(x, 3, 2, 1), LAYOUTS[name]())


def test_one_and_three_dimensions() -> None:
    check(lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True)[0], ties(2, 3, 17))
    check(lambda x: F.max_pool3d(x, 3, 2, 1), ties(2, 3, 5, 6, 7))
    check(lambda x: F.max_pool3d(x, (1, 3, 2), (1, 2, 1), (0, 1, 1), (1, 1, 2), True), special(1, 2, 5, 6, 7))


@pytest.mark.parametrize("size", [(4, 5), (13, 3), (1, 1), (11, 9), (7, 14)])
def test_adaptive_windows(size: tuple[int, int]) -> None:
    check(lambda x: F.adaptive_max_pool2d(x, size), special(2, 3, 11, 9))


def test_adaptive_windows_of_one_and_three_dimensions() -> None:
    check(lambda x: F.adaptive_max_pool1d(x, 4), ties(2, 3, 11))
    check(lambda x: F.adaptive_max_pool3d(x, (2, 5, 4)), ties(2, 3, 5, 6, 7))


def test_symbolic_sizes() -> None:
    torch._dynamo.reset()
    opforge.reset_stats()
    f = torch.compile(lambda x: F.max_pool2d(x, 3, 2, 1), backend="opforge", dynamic=True, options={"strict": True})
    for n in (4, 6, 9):
        x, y = (ties(n, 3, 9, 8).requires_grad_() for _ in range(2))
        f(x).square().sum().backward()
        F.max_pool2d(y, 3, 2, 1).square().sum().backward()
        assert torch.equal(x.grad, y.grad)
    assert not any("max_pool" in name for name in opforge.stats()["externs"])


def test_what_follows_shares_the_kernel() -> None:
    """The gradient of an activation before the pool, and no table that is filled with zeros."""
    torch._dynamo.reset()
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    y = torch.compile(lambda x: F.max_pool2d(x.relu(), 3, 2, 1), backend="opforge", options={"strict": True})(x)
    opforge.reset_stats()
    y.sum().backward()
    assert opforge.stats()["kernels"] == 1


def test_positions_that_are_returned_too() -> None:
    torch._dynamo.reset()
    x, y = (ties(2, 3, 9, 8).requires_grad_() for _ in range(2))
    f = lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)  # noqa: E731
    (ours, places), (eager, where) = torch.compile(f, backend="opforge", options={"strict": True})(x), f(y)
    assert places.dtype == torch.int64
    assert torch.equal(places, where)
    (ours * places).sum().backward()
    (eager * where).sum().backward()
    assert torch.equal(x.grad, y.grad)
