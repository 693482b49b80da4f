"""Routines at the edges of what they take: many dimensions, positions out of range, squares beyond float64, large parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opforge

INF = float("inf")
UPPER = [6.850033733896859e-29, 2.2448635526394104e-09, 0.006312353542900347]
"""Q(a, a) of 1e-30, 1e-10 and 1e-3 in float32, by mpmath."""


def compiled(f: Callable[..., Any], *args: Tensor) -> Any:
    """The result of the compiled program, of which nothing is an eager kernel's."""
    torch._dynamo.reset()
    opforge.reset_stats()
    result = torch.compile(f, backend="opforge", fullgraph=True)(*args)
    stats = opforge.stats()
    assert not stats["reasons"], stats["reasons"]
    assert not stats["fallbacks"], stats["fallbacks"]
    return result


def test_more_dimensions_than_any_other_test_has() -> None:
    # Coordinates had room for 16 dimensions, and those beyond lay in other memory.
    x = torch.randn([1] * 17 + [3, 2], generator=torch.Generator().manual_seed(0))
    for f in (
        lambda x: x.sort(-1),
        lambda x: x.cummax(-2),
        lambda x: torch.frexp(x),
        lambda x: torch.linalg.det(x[..., :2, :]),
    ):
        torch.testing.assert_close(compiled(f, x), f(x))


@pytest.mark.parametrize("place", [4, -1, 10**9, -(10**9)])
def test_a_sorter_out_of_range_is_refused(place: int) -> None:
    # It read at that position, and ended the process.
    def program(x: Tensor, order: Tensor) -> Tensor:
        return torch.searchsorted(x, x, sorter=order)

    x, order = torch.tensor([3.0, 1.0, 2.0, 5.0]), torch.tensor([1, 2, 0, 3])
    torch.testing.assert_close(compiled(program, x, order), program(x, order))
    order[3] = place
    with pytest.raises(RuntimeError, match="sorter index out of range"):
        program(x, order)
    with pytest.raises(RuntimeError, match="sorter index out of range"):
        torch.compile(program, backend="opforge")(x, order)


@pytest.mark.parametrize("pivot", [4, 0, -5, 2**30])
@pytest.mark.parametrize(
    "f", [torch.lu_unpack, lambda lu, p: torch.linalg.lu_solve(lu, p, lu)], ids=["lu_unpack", "lu_solve"]
)
def test_pivots_out_of_range_are_refused(f: Callable[..., Any], pivot: int) -> None:
    # Rows were exchanged there.
    lu, pivots = torch.linalg.lu_factor(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(compiled(f, lu, pivots), f(lu, pivots))
    pivots[2] = pivot
    for run in (f, torch.compile(f, backend="opforge")):
        with pytest.raises(RuntimeError, match=r"(?i)pivots"):
            run(lu, pivots)


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e200, 1e307])
def test_reflections_of_numbers_whose_squares_are_no_floats(scale: float) -> None:
    a = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, r = compiled(torch.linalg.qr, a * scale)
    torch.testing.assert_close(q, torch.linalg.qr(a)[0], rtol=1e-3 if scale < 1e-300 else 1e-12, atol=1e-12)
    torch.testing.assert_close(r, torch.linalg.qr(a * scale)[1], rtol=1e-3 if scale < 1e-300 else 1e-12, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "a", [[[INF]], [[1.0, 0.0], [0.0, INF]], [[INF, 0.0], [0.0, 1.0]], [[INF, INF], [INF, INF]], [[-INF]]]
)
def test_infinite_pivots(a: list[list[float]], dtype: torch.dtype) -> None:
    x = torch.tensor(a, dtype=dtype)
    assert torch.equal(compiled(torch.linalg.cholesky_ex, x).info, torch.linalg.cholesky_ex(x).info)


def test_incomplete_gamma_functions_of_large_and_small_parameters() -> None:
    """Against a run in float64, and at parameters near 0, where torch leaves out a term, against mpmath's numbers."""
    a = torch.tensor([1e10, 1e12, 1e15, 3e38, 1e5, 1e4, 2e4, 0.9, 1e14])[:, None]
    x = a * (1 + torch.tensor([0.0, 1e-7, -1e-7, 3e-4, -3e-4, 0.01, -0.02, 0.5, -0.5]))
    lower, upper = compiled(lambda a, x: (torch.igamma(a, x), torch.igammac(a, x)), a.expand_as(x).contiguous(), x)
    wide = a.double().expand_as(x), x.double()
    torch.testing.assert_close(lower.double(), torch.igamma(*wide), rtol=5e-7, atol=1e-40)
    torch.testing.assert_close(upper.double(), torch.igammac(*wide), rtol=5e-7, atol=1e-40)
    few = torch.tensor([1e-30, 1e-10, 1e-3])
    found = compiled(torch.igammac, few, few)
    torch.testing.assert_close(found.double(), torch.tensor(UPPER, dtype=torch.float64), rtol=5e-7, atol=0.0)


def test_the_triangle_that_nobody_reads_may_be_nan() -> None:
    # The inverse was refused.
    x = torch.eye(3) + 0.5
    x[0, 2] = float("nan")
    for f in (torch.linalg.eigvalsh, lambda x: torch.linalg.pinv(x, hermitian=True)):
        torch.testing.assert_close(compiled(f, x), f(x))
    x[2, 0] = float("nan")
    with pytest.raises(torch.linalg.LinAlgError):
        torch.compile(lambda x: torch.linalg.pinv(x, hermitian=True), backend="opforge")(x)
