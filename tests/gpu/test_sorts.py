"""Sorts, selections and running extremes by kernels of ours on a CUDA device, bit for bit beside eager's stable sort. `make test-gpu`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import opforge
from tests.support.sorting_interpreted import DTYPES, numbers, same, sorted_first

pytestmark = pytest.mark.gpu

SHAPES = (((40, 33, 70), 1), ((1000, 256), -1), ((60, 3000), 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_equal_to_a_stable_sort(dtype: str, shape: tuple[int, ...], dim: int) -> None:
    torch.manual_seed(0)
    x = numbers(getattr(torch, dtype), shape).cuda()

    def program(x: Tensor) -> tuple[Tensor, ...]:
        found = (*torch.sort(x, dim), *torch.sort(x, dim, descending=True))
        if x.dtype != torch.bool:
            found += (*torch.topk(x, 5, dim), *torch.topk(x, 33, dim, False))
            found += (*torch.cummax(x, dim), *torch.cummin(x, dim))
        return found

    def expected(x: Tensor) -> tuple[Tensor, ...]:
        found = (*sorted_first(x, dim, False), *sorted_first(x, dim, True))
        if x.dtype != torch.bool:
            found += (*sorted_first(x, dim, True, 5), *sorted_first(x, dim, False, 33))
            found += (*torch.cummax(x, dim), *torch.cummin(x, dim))
        return found

    same(program, expected, x, f"{dtype} {shape} {dim}")


@pytest.mark.parametrize("n", [2, 5, 16, 31, 32, 33, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_elements_are_where_eager_has_them(dtype: str, n: int) -> None:
    """A sort that need not be stable, of rows and columns."""
    torch.manual_seed(0)
    x = numbers(getattr(torch, dtype), (50, n)).cuda()
    program = lambda x: (*x.sort(1), *x.sort(1, descending=True), *x.t().sort(0), x.argsort(1))  # noqa: E731
    same(program, program, x, f"{dtype} {n}")


@pytest.mark.parametrize(("dtype", "n"), [("float32", 256), ("float16", 1024)])
def test_the_longest_rows(dtype: str, n: int) -> None:
    x = numbers(getattr(torch, dtype), (7, n)).cuda()
    k = n - 24
    same(
        lambda x: (*x.sort(1), *x.topk(k)), lambda x: (*sorted_first(x, 1, False), *sorted_first(x, 1, True, k)), x, ""
    )


def test_rows_of_a_symbolic_number_and_at_odd_addresses() -> None:
    torch._dynamo.reset()
    opforge.reset_stats()
    compiled = torch.compile(lambda x: (x.sort(1), x.topk(3, 1)), backend="opforge", fullgraph=True)
    for n in (5, 9, 700):
        x = torch.randn(n * 40 + 1, device="cuda")[1:].view(n, 40)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        (a, b), (c, d) = compiled(x)
        values, places = x.sort(1)
        assert torch.equal(a, values)
        assert torch.equal(b, places)
        assert torch.equal(c, values[:, -3:].flip(1))
        assert torch.equal(x.gather(1, d), c)
    assert not opforge.stats()["reasons"]


def test_gradients_and_replays() -> None:
    torch._dynamo.reset()

    def loss(x: Tensor) -> Tensor:
        values, places = torch.topk(x.sin(), 4)
        return (values * places).sum()

    x = torch.randn(64, 128, device="cuda", requires_grad=True)
    (expected,) = torch.autograd.grad(loss(x), x)
    compiled = torch.compile(loss, backend="opforge", mode="reduce-overhead")
    for _ in range(4):
        (found,) = torch.autograd.grad(compiled(x), x)
        torch.testing.assert_close(found, expected)
