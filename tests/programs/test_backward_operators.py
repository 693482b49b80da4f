"""Operators of backward graphs where generated arguments do not reach: special values, and positions that a forward found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import opforge

aten = torch.ops.aten
nan, inf = float("nan"), float("inf")


def _both(f: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    torch._dynamo.reset()
    opforge.reset_stats()
    with torch.no_grad():
        return torch.compile(f, backend="opforge", options={"strict": True})(*args), f(*args)


def test_max_pool_takes_the_last_nan_and_the_first_of_equals() -> None:
    x = torch.full((2, 1, 4, 4), -inf)
    x[0, 0] = torch.tensor([[nan, 1, 2, nan], [3, nan, -inf, 5], [-inf, -inf, -inf, -inf], [-inf, 2, 2, nan]])
    x[1, 0, 0, 0], x[1, 0, 3, 3] = 1, nan
    for ours, eager in zip(*_both(lambda x: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1]), x), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)
    assert not opforge.stats()["externs"]


def test_max_pool_of_minus_infinities_at_the_border() -> None:
    """The padding was the lowest finite number: a border window of minus infinities gave that."""
    ours, eager = _both(lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1), torch.full((1, 1, 4, 4), -inf))
    assert torch.equal(ours, eager)


def test_gradient_of_max_pool_with_overlapping_windows() -> None:
    x = torch.randint(0, 3, (2, 3, 9, 8)).float()
    _, indices = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    grad = torch.randn(indices.shape)
    ours, eager = _both(
        lambda g, x, i: aten.max_pool2d_with_indices_backward(g, x, [3, 3], [2, 2], [1, 1], [1, 1], False, i),
        grad,
        x,
        indices,
    )
    assert torch.equal(ours, eager)
    assert not opforge.stats()["externs"]
