"""Sizes that are equal only by a guard, or by a condition on data: operators that rely on it are compiled as any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opforge

Shape = tuple[int, ...]
FLAT: tuple[tuple[Shape, ...], ...] = (((2, 6), (3, 4)), ((2, 10), (4, 5)), ((3, 10), (6, 5)))
BATCHES: tuple[tuple[Shape, ...], ...] = (((5, 2, 6), (5, 3, 4)), ((7, 2, 10), (7, 4, 5)), ((4, 3, 10), (4, 6, 5)))
THREE: tuple[tuple[Shape, ...], ...] = (
    ((2, 6), (3, 4), (12, 1)),
    ((2, 10), (4, 5), (5, 4)),
    ((3, 10), (6, 5), (15, 2)),
)
PROGRAMS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[Shape, ...], ...]]] = {
    "flattened": (lambda x, y: (x.reshape(-1) * y.reshape(-1)).sin(), FLAT),
    "flattened in part": (lambda x, y: F.layer_norm(x.flatten(1) + y.flatten(1), [x.shape[1] * x.shape[2]]), BATCHES),
    "of one, of the other": (lambda x, y: (x.reshape(y.shape) * y).sin(), FLAT),
    "normalized and back": (lambda x, y: (x.reshape(-1) + y.reshape(-1)).softmax(0).view(x.shape) * x, FLAT),
    "padded": (lambda x, y: F.pad(x.flatten(), (1, 2)) * F.pad(y.flatten(), (2, 1)), FLAT),
    "padded later": (
        lambda x, y: (x.flatten() * y.flatten()).sum() * F.pad(x.flatten(), (1, 2)) * F.pad(y.flatten(), (2, 1)),
        FLAT,
    ),
    "doubled first": (
        lambda x, y: torch.cat([x.flatten()] * 2) * torch.cat([y.flatten()] * 2) * (x.flatten() * y.flatten()).sum(),
        FLAT,
    ),
    "chosen": (lambda x, y, z: torch.where(x.flatten() > 0, y.flatten(), z.flatten()) * x.sum(), THREE),
    "complex": (lambda x, y: (torch.complex(x.flatten(), y.flatten()) * 2j).abs(), FLAT),
    "loss": (lambda x, y: F.mse_loss(x.flatten(), y.flatten()), FLAT),
    "unfolded": (
        lambda x, y: x.unflatten(0, (y.shape[0], -1)).sum(-1) * y,
        (((12,), (3,)), ((20,), (4,)), ((30,), (5,))),
    ),
    "repeated": (
        lambda x, y, z: x.repeat(z.shape[0]) * y.flatten() * z.sum(),
        (((4,), (10, 2), (5,)), ((6,), (4, 9), (6,)), ((6,), (7, 6), (7,))),
    ),
    "sums": (
        lambda x, y, z, w: torch.cat([x, y]) * torch.cat([z, w]),
        (((2,), (6,), (3,), (5,)), ((3,), (7,), (6,), (4,))),
    ),
    "every second": (lambda x, y: x[::2] + y, (((7,), (4,)), ((9,), (5,)), ((10,), (5,)))),
    "pooled": (
        lambda x, y: F.avg_pool1d(x, 2) * y,
        (((2, 6, 14), (2, 6, 7)), ((2, 6, 11), (2, 6, 5)), ((3, 4, 18), (3, 4, 9))),
    ),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    opforge.reset_stats()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_runs_eagerly(name: str) -> None:
    program, calls = PROGRAMS[name]
    torch.manual_seed(0)
    compiled = torch.compile(program, backend="opforge", dynamic=True, fullgraph=True)
    for shapes in calls:
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        weight: Tensor | None = None
        results = []
        for f in (compiled, program):
            out = f(*inputs)
            weight = torch.randn(out.shape) if weight is None else weight
            results.append((out, *torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    stats = opforge.stats()
    assert not stats["externs"], stats["reasons"]
    assert not stats["fallbacks"]


def _of_pairs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A condition on the number of elements that are positive, and a square of it."""
    n = (x > 0).sum().item()
    torch._check(n >= 1)
    torch._check(n * n == y.numel())
    return (torch.ones(n, n).flatten() * y.flatten()).cos(), torch.ones(n * n) + y.flatten()


def _of_two(x: Tensor, y: Tensor) -> Tensor:
    """Two numbers from data that have a fixed ratio."""
    n, m = (x > 0).sum().item(), (x < 0).sum().item()
    torch._check(n >= 1)
    torch._check(m >= 1)
    torch._check(n * 2 == m * 3)
    return (torch.ones(n * 2) * torch.arange(m * 3)).cos() * y.sum()


def _of_selected(x: Tensor, y: Tensor) -> Tensor:
    """A selection of a known number of elements, which is not empty."""
    v = x[x > 0]
    torch._check(v.shape[0] * y.shape[0] == y.numel())
    return (v.repeat(y.shape[0]) * y.flatten()).sin()


@pytest.mark.parametrize("program", [_of_pairs, _of_two, _of_selected])
def test_conditions_on_data(program: Callable[[Tensor, Tensor], Any]) -> None:
    compiled = torch.compile(program, backend="opforge", dynamic=True, fullgraph=True)
    for n in (3, 6, 9):
        x = torch.cat([torch.ones(n), -torch.ones(n * 2 // 3)])
        y = torch.randn(n, n)
        torch.testing.assert_close(compiled(x, y), program(x, y))
    stats = opforge.stats()
    assert stats["externs"].keys() <= {"aten._local_scalar_dense.default", "aten.index.Tensor"}, stats["reasons"]
    assert not stats["fallbacks"]
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        compiled(torch.ones(5), torch.randn(4, 4))


def test_paddings_that_a_guard_says_are_none() -> None:
    """`padding="same"` of an even dilated width: a size less twice its half was not known to be a remainder that is 0, by lowering and checker."""

    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w, b, padding="same", dilation=3)

    compiled = torch.compile(program, backend="opforge", dynamic=True, fullgraph=True)
    for n in (5, 7):
        given = [torch.randn(shape, requires_grad=True) for shape in ((4, n, n), (1, 4, 2, 3), (1,))]
        results = [(out := f(*given), *torch.autograd.grad(out.sin().sum(), given)) for f in (compiled, program)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    stats = opforge.stats()
    assert stats["externs"].keys() == {"aten.convolution.default", "aten.convolution_backward.default"}
    assert not stats["fallbacks"]
