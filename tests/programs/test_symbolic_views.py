"""Views and results whose sizes are known when the graph runs, of memory whose size is known before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opforge
from tests.fuzz.observe import Direct
from tests.support.matrix import symbolic

Program = Callable[..., Tensor]


def _first_row_written(x: Tensor) -> Tensor:
    v = (x.sum(0, keepdim=True) + 1).expand(x.shape[0], -1).clone()
    v[0] = x.sum()
    return v


def _half_written(x: Tensor) -> Tensor:
    v = torch.diag_embed(x)
    v.chunk(2)[0].add_(1)
    return v


VIEWS: dict[str, Program] = {
    "sort of an expanded number": lambda x: torch.sort(x.sum().expand(x.shape[0]))[0],
    "product of an expanded number": lambda x: torch.mm(x.sum().expand(x.shape[0], x.shape[0]), x),
    "selection from an expanded number": lambda x: torch.kthvalue(x.sum().expand(x.shape[0]), 1)[0],
    "transform of an expanded number": lambda x: torch.fft.fft(x.sum().expand(x.shape[0])).real,
    "a row written": _first_row_written,
    "half written": _half_written,
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_symbolic_sizes(name: str) -> None:
    """Views of the arena were made once, before any size was known; positions in a tensor without elements were divided by 0."""
    f = VIEWS[name]
    run = torch.compile(f, backend="opforge", dynamic=True)
    opforge.reset_stats()
    for size in ((3, 2), (5, 2), (4, 7), *([(4, 0), (3, 0)] if f is _half_written else [])):
        x = torch.randn(size)
        torch.testing.assert_close(run(x), f(x), rtol=1e-5, atol=1e-5)
    assert not opforge.stats()["fallbacks"]


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_a_size_that_guards_decide_is_a_factor_of_strides(mode: str) -> None:
    """The pool's height was 1 by a guard, and the stride of the dimension before it still the expression: it seemed to have gaps."""

    def f(x: Tensor) -> Tensor:
        return F.max_pool2d(F.interpolate(x, size=(x.shape[2] // 2, x.shape[3] * 2), mode=mode), 2)

    run = torch.compile(f, backend="opforge", dynamic=True)
    opforge.reset_stats()
    for size in ((2, 3, 4, 4), (2, 3, 5, 6), (3, 2, 8, 8)):
        x = torch.randn(size)
        a, b = (x.clone().requires_grad_() for _ in range(2))
        for leaf, program in ((a, f), (b, run)):
            program(leaf).square().sum().backward()
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-5, atol=1e-6)
    assert not opforge.stats()["fallbacks"]


OUTS: dict[str, tuple[Callable[[Tensor, Tensor], object], tuple[int, ...], tuple[int, ...]]] = {
    "slice": (lambda x, o: torch.add(x[: x.shape[0] // 2], 1, out=o), (4, 3), (2, 3)),
    "triangle": (lambda x, o: torch.triu(x[: x.shape[0] // 2], out=o), (4, 3), (2, 3)),
    "diagonal": (lambda x, o: torch.diagonal_copy(x, 1, out=o), (4, 4), (3,)),
    "written again": (lambda x, o: torch.diagonal_copy(x, 1, out=o).add_(1), (4, 4), (3,)),
    "read again": (lambda x, o: (torch.diagonal_copy(x, 1, out=o), o + x[0, 1:]), (4, 4), (3,)),
    "read by a library": (lambda x, o: (torch.diagonal_copy(x, 1, out=o), torch.mv(x[1:, 1:], o)), (4, 4), (3,)),
}


@pytest.mark.parametrize("name", OUTS)
def test_sizes_that_only_guards_compare_are_verified(name: str) -> None:
    """The checkers, which every test runs with, took two symbols of one size for two sizes."""
    f, first, second = OUTS[name]
    given = [torch.randn(first), torch.randn(second)]
    opforge.reset_stats()
    run = opforge.compile_fx(Direct(f), symbolic(given)[0])
    ours, eager = [t.clone() for t in given], [t.clone() for t in given]
    torch.testing.assert_close(run(*ours), f(*eager))
    torch.testing.assert_close(ours, eager)
    assert not opforge.stats()["fallbacks"]


def test_rrelu_without_training() -> None:
    """The result of an operator that writes to one argument and returns another tensor was nobody's: the graph ran eagerly."""
    run = torch.compile(lambda x: F.rrelu(x, training=False), backend="opforge")
    opforge.reset_stats()
    x = torch.tensor([-2.0, -0.0, 0.5, float("nan"), -float("inf")])
    a, b = (x.clone().requires_grad_() for _ in range(2))
    expected, found = F.rrelu(a, training=False), run(b)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
    expected.sum().backward()
    found.sum().backward()
    torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=0)
    assert opforge.stats()["fallbacks"] == opforge.stats()["externs"] == {}


def test_of_two_probabilities_the_input_is_told_of() -> None:
    run = torch.compile(F.binary_cross_entropy, backend="opforge")
    for f in (F.binary_cross_entropy, run):
        with pytest.raises(RuntimeError, match="all elements of input should be between 0 and 1"):
            f(torch.full((3,), 2.0), torch.full((3,), 2.0))
