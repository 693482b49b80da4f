"""Operators whose edge values and errors no generated test has: windows with NaN, positions, means of nothing, 0-dim indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opforge

F = torch.nn.functional
NAN, INF = float("nan"), float("inf")


def check(f: Callable[..., Any], *args: Tensor, dynamic: bool = False) -> None:
    """Compiled and eager results are equal, NaN for NaN, and no eager kernel ran."""
    opforge.reset_stats()
    torch._dynamo.reset()
    with torch.no_grad():
        ours = torch.compile(f, backend="opforge", fullgraph=True, dynamic=dynamic)(*args)
        eager = f(*args)
    torch.testing.assert_close(ours, eager, equal_nan=True)
    stats = opforge.stats()
    assert not stats["reasons"], stats["reasons"]
    assert not stats["fallbacks"], stats["fallbacks"]


def edged(*shape: int) -> Tensor:
    """Random numbers with every special one, and equal ones, among them."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    flat = x.view(-1)
    for k, value in enumerate((NAN, INF, -INF, -0.0, 0.0, NAN)):
        flat[k * 5 % flat.numel()] = value
    return x


@pytest.mark.parametrize("size", [(3, 2), (4, 5), (9, 7), (1, 1)])
def test_adaptive_pools_with_special_values(size: tuple[int, int]) -> None:
    x = edged(2, 3, 7, 6)
    check(lambda x: F.adaptive_max_pool2d(x, size, return_indices=True), x)
    check(lambda x: F.adaptive_avg_pool2d(x, size), x)
    check(lambda x: F.adaptive_max_pool2d(x, size, return_indices=True), torch.full((1, 2, 7, 6), -INF))


def test_adaptive_pools_of_three_dimensions_and_of_one() -> None:
    check(lambda x: F.adaptive_max_pool3d(x, (2, 3, 4), return_indices=True), edged(2, 3, 5, 4, 7))
    check(lambda x: F.adaptive_avg_pool3d(x, (2, 3, 4)), edged(2, 3, 5, 4, 7))
    check(lambda x: F.adaptive_max_pool1d(x, 3, return_indices=True), edged(2, 3, 7))


@pytest.mark.parametrize("inner", [True, False])
def test_pools_that_end_beyond_the_border(inner: bool) -> None:
    x = edged(2, 3, 7, 8)
    check(lambda x: F.avg_pool2d(x, (3, 2), (2, 3), (1, 1), ceil_mode=True, count_include_pad=inner), x)
    check(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=inner, divisor_override=5), x)
    check(lambda x: F.max_pool2d(x, (3, 2), (2, 3), (1, 1), ceil_mode=True), x)


def test_elements_go_back_to_where_they_were_the_greatest() -> None:
    def program(x: Tensor) -> Tensor:
        values, positions = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(values, positions, 2)

    check(program, torch.randn(2, 3, 8, 6))


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("own", [True, False])
def test_updates_by_position_with_special_values(reduce: str, own: bool) -> None:
    index = torch.tensor([[0, 1, 1], [3, 3, 3], [0, 0, 2], [2, 1, 0]])
    check(lambda x, i, y: x.scatter_reduce(0, i, y, reduce, include_self=own), edged(6, 3), index, edged(4, 3))
    whole = torch.arange(18).view(6, 3) - 9
    check(lambda x, i, y: x.scatter_reduce(0, i, y, reduce, include_self=own), whole, index, whole[:4] - 3)
    if reduce != "sum":
        rows = torch.tensor([4, 0, 0, 2])
        check(lambda x, i, y: x.index_reduce(0, i, y, reduce, include_self=own), edged(6, 3), rows, edged(4, 3))
        check(lambda x, i, y: x.index_reduce(0, i, y, reduce, include_self=own), whole, rows, whole[:4] - 3)


UPDATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, i: x.gather(0, i),
    "index_select": lambda x, i: x.index_select(0, i),
    "scatter": lambda x, i: x.scatter(0, i, x * 2),
    "scatter a value": lambda x, i: x.scatter(0, i, 3.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i, x * 2),
    "index_add": lambda x, i: x.index_add(0, i, x * 2),
    "index_copy": lambda x, i: x.index_copy(0, i, x * 2),
    "index_fill": lambda x, i: x.index_fill(0, i, 3.0),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i, x * 2, "mean"),
    "index_reduce": lambda x, i: x.index_reduce(0, i, x * 2, "mean"),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_tensor_without_dimensions_is_one_of_one_element(name: str) -> None:
    f = UPDATES[name]
    check(f, torch.tensor(1.5), torch.tensor(0))
    with pytest.raises((IndexError, RuntimeError)) as eager:
        f(torch.tensor(1.5), torch.tensor(1))
    torch._dynamo.reset()
    with pytest.raises((IndexError, RuntimeError)) as ours:
        torch.compile(f, backend="opforge", fullgraph=True)(torch.tensor(1.5), torch.tensor(1))
    assert ours.type is eager.type


def test_masked_scatter_takes_elements_in_order_and_needs_enough() -> None:
    x, mask = edged(4, 5), torch.arange(20).view(4, 5) % 3 == 0
    check(lambda x, m, y: x.masked_scatter(m, y), x, mask, torch.arange(9.0))
    check(lambda x, m, y: x.masked_scatter(m, y), x, torch.zeros_like(mask), torch.arange(9.0))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError):
        torch.compile(lambda x, m, y: x.masked_scatter(m, y), backend="opforge")(x, mask, torch.arange(3.0))


def test_ranges_between_tensors_and_rolls_of_all_dimensions() -> None:
    check(lambda a, b: torch.linspace(a, b, 7), torch.tensor(-1.5), torch.tensor(2.0))
    check(lambda a: torch.logspace(a, 2, 5, base=2.0), torch.tensor(-1.5))
    check(lambda x: torch.roll(x, -5), edged(3, 4))
    check(lambda x: torch.roll(x, 2), edged(3, 4), dynamic=True)
    check(lambda x, y: torch.block_diag(x, y), edged(3, 4), edged(2, 2))


@pytest.mark.parametrize("decimals", [3, 0, -1, 60])
def test_decimals_of_special_values(decimals: int) -> None:
    check(lambda x: torch.round(x, decimals=decimals), edged(3, 40) * 1234.5678)


@pytest.mark.parametrize("order", [0, 1, 2, 5])
def test_polygamma_at_poles_and_between_them(order: int) -> None:
    x = torch.tensor([0.0, -0.0, 0.5, 3.0, 40.0, -0.5, -2.5, INF, NAN])
    check(lambda x: torch.polygamma(order, x), x)


def test_targets_that_are_coordinates() -> None:
    # The checker of plans did not see that a stored condition holds everywhere, so that no position is out of range.
    x = edged(6, 37).nan_to_num(0.5)
    check(lambda x: F.cross_entropy(x, torch.arange(6), reduction="none"), x)
    check(lambda x: F.cross_entropy(x, torch.arange(6), weight=x[5].exp(), label_smoothing=0.1), x)


def test_a_factor_and_its_sum_are_rounded_once() -> None:
    """The product alone is too large, or loses what the sum then shows."""
    x, y = torch.tensor([INF, 3e38, 1.5, 0.1, -0.0]), torch.tensor([-3.4e38, -3e38, -3.7, 0.1, 0.0])
    for f in (
        lambda x, y: torch.add(x, y, alpha=3),
        lambda x, y: torch.sub(x, y, alpha=-3),
        lambda x, y: torch.rsub(y, x, alpha=-3),
    ):
        check(f, x, y)
    check(lambda x, y: torch.lerp(x[1:], y[1:], 0.3), x, y)
    check(lambda x, y: torch.lerp(x[1:], y[1:], x[1:]), x, y)


def test_the_sign_of_zero_of_a_power_without_one() -> None:
    x = torch.tensor([-0.0, 0.0, -1e-30, 1e-30, NAN, INF, -INF, 200.0, 0.5])
    for f in (torch.expm1, F.elu, F.celu, F.selu):
        torch._dynamo.reset()
        found = torch.compile(f, backend="opforge")(x)
        torch.testing.assert_close(found, f(x), equal_nan=True)
        assert torch.equal(found.signbit() & (found == 0), f(x).signbit() & (f(x) == 0))


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 2.0, INF])
def test_distances_of_rows_with_special_values(p: float) -> None:
    # Of p = 0 a NaN counted as 1.
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    x[0, 3] = x[1, 0] = x[2, 8] = NAN
    x[3] = INF
    check(lambda x: torch.pdist(x, p), x)
    torch._dynamo.reset()
    run = torch.compile(lambda x: torch.cdist(x, x.flip(0), p), backend="opforge")
    torch.testing.assert_close(run(x), torch.cdist(x, x.flip(0), p), equal_nan=True)
