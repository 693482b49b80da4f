"""Operators that torch makes of others by a kernel that reads sizes as numbers are compiled once for all sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opforge
from opforge.generated.decompositions import COMPOSITES

PROGRAMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "matrices": (lambda x, y: torch.kron(x.tanh(), y) * 2, lambda n: (torch.randn(n, 3), torch.randn(2, n))),
    "a vector and a matrix": (lambda x, y: x.kron(y), lambda n: (torch.randn(n), torch.randn(2, n + 1))),
    "more dimensions before": (lambda x, y: torch.kron(x, y), lambda n: (torch.randn(2, n, 3), torch.randn(n))),
    "other dtypes": (
        lambda x, y: torch.kron(x, y),
        lambda n: (torch.randn(n, 3), torch.randn(2, n, dtype=torch.float64)),
    ),
}

FILLED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[int], Tensor]]] = {
    "wide": (lambda x: _filled(x, 1.5), lambda n: torch.randn(n, n + 3)),
    "tall": (lambda x: _filled(x, 2), lambda n: torch.randn(2 * n, n)),
    "from the top again": (lambda x: _filled(x, 2.5, wrap=True), lambda n: torch.randn(2 * n + 1, n - 1)),
    "a cube": (lambda x: _filled(x[:, None, None] * torch.ones(len(x), len(x), len(x)), -1), lambda n: torch.randn(n)),
}
"""Diagonals that are written."""
CHAINS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "two": (lambda x, y: torch.linalg.multi_dot([x, y]), lambda n: (torch.randn(n, 3), torch.randn(3, n + 1))),
    "three": (lambda x, y: torch.linalg.multi_dot([x, y, x]), lambda n: (torch.randn(n, 3), torch.randn(3, n))),
    "vectors": (
        lambda x, y: torch.linalg.multi_dot([x[:, 0], y, x, y[0]]),
        lambda n: (torch.randn(n, n), torch.randn(n, n)),
    ),
    "five": (lambda x, y: torch.chain_matmul(x, y, x, y, x), lambda n: (torch.randn(n, 3), torch.randn(3, n))),
}
VANDER: dict[str, Callable[[Tensor], Tensor]] = {
    "square": torch.vander,
    "three columns": lambda x: torch.vander(x, 3) * 2,
    "increasing": lambda x: torch.vander(x, N=4, increasing=True),
    "whole numbers": lambda x: torch.vander(x.to(torch.int32), increasing=True),
    "no column": lambda x: torch.vander(x, 0),
    "one column": lambda x: torch.vander(x, 1),
}


def _filled(x: Tensor, value: float, wrap: bool = False) -> Tensor:
    y = x * 2
    return y.fill_diagonal_(value, wrap).sin() * y


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_for_all_sizes(name: str) -> None:
    program, inputs = PROGRAMS[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    opforge.reset_stats()
    with opforge.config.patch(strict=True):
        compiled = torch.compile(program, backend="opforge", fullgraph=True, dynamic=True)
        for n in (4, 5, 7):
            given = inputs(n)
            results = []
            for f in (compiled, program):
                leaves = [t.clone().requires_grad_() for t in given]
                out = f(*leaves)
                results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
            torch.testing.assert_close(*results)
            assert results[0][0].stride() == results[1][0].stride()
    assert opforge.stats()["graphs"] == 1


@pytest.mark.parametrize("name", FILLED)
def test_a_diagonal_is_filled(name: str) -> None:
    program, made = FILLED[name]
    _same_for_all_sizes(program, lambda n: (made(n),))
    assert not opforge.stats()["externs"]


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_products(name: str) -> None:
    program, made = CHAINS[name]
    _same_for_all_sizes(program, made)
    assert {op.split(".")[1] for op in opforge.stats()["externs"]} <= {"mm", "mv", "dot"}


@pytest.mark.parametrize("name", VANDER)
def test_powers_in_columns(name: str) -> None:
    """Eager's backward raises: its forward writes to what autograd saved."""
    _same_for_all_sizes(VANDER[name], lambda n: (torch.randn(n) * 3,), grad=False)
    assert not opforge.stats()["externs"]


KERNELS_THAT_ASK: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "weighted and smoothed loss": (
        lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.2),
        lambda: (torch.randn(6, 8), torch.arange(6), torch.rand(8)),
    ),
    "of images": (
        lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.2, reduction="sum"),
        lambda: (torch.randn(2, 8, 5, 3), torch.arange(30).view(2, 5, 3) % 8, torch.rand(8)),
    ),
    "differences": (lambda x: torch.gradient(x), lambda: (torch.randn(6, 8),)),
    "differences at places": (
        lambda x, at: torch.gradient(x, spacing=(at,), dim=1),
        lambda: (torch.randn(6, 8), torch.arange(8.0) ** 2),
    ),
    "powers of two numbers": (lambda x: torch.vander(x) * 2, lambda: (torch.randn(2),)),
    "powers": (lambda x: torch.linalg.vander(x), lambda: (torch.randn(5),)),
    "greatest": (lambda x: (x.max(1), x.min(0)), lambda: (torch.randn(5, 6),)),
    "greatest boolean": (lambda x: ((x > 0).max(1), (x > 1).min(0, True)), lambda: (torch.randn(5, 6),)),
}
"""Programs with kernels in C++ that ask for sizes as plain numbers, of tensors that have no symbol left; and conditions on sizes."""


@pytest.mark.parametrize("name", KERNELS_THAT_ASK)
def test_plain_sizes_are_told(name: str) -> None:
    """A whole graph ran eagerly: "a kernel of torch reads symbolic sizes as plain numbers"; or an operator did."""
    program, inputs = KERNELS_THAT_ASK[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    opforge.reset_stats()
    given = inputs()
    compiled = torch.compile(program, backend="opforge", dynamic=True)(*given)
    torch.testing.assert_close(compiled, program(*given))
    stats = opforge.stats()
    assert not stats["fallbacks"]
    assert not stats["externs"]
    assert stats["kernels"]


def test_a_backward_that_eager_refuses() -> None:
    """Eager's `vander` writes over what its backward reads. The formula for symbolic sizes does not, and its backward gave gradients."""
    for dynamic in (False, True):
        x = torch.randn(5, requires_grad=True)
        y = torch.compile(torch.vander, backend="opforge", dynamic=dynamic)(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def _same_for_all_sizes(
    program: Callable[..., Tensor], made: Callable[[int], tuple[Tensor, ...]], grad: bool = True
) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    opforge.reset_stats()
    compiled = torch.compile(program, backend="opforge", fullgraph=True, dynamic=True)
    with opforge.config.patch(strict=True):
        for n in (4, 5, 7):
            given = [t.requires_grad_(grad) for t in made(n)]
            results = [f(*given) for f in (compiled, program)]
            assert results[0].stride() == results[1].stride()
            torch.testing.assert_close(*results)
            if grad:
                weight = torch.randn(results[0].shape)
                torch.testing.assert_close(*(torch.autograd.grad((y * weight).sum(), given) for y in results))
    assert opforge.stats()["graphs"] == 1


@pytest.mark.parametrize(
    "sizes", [((), ()), ((), (3,)), ((2, 0), (3, 2)), ((2,), (1, 2, 3)), ((1, 1), (4, 4))], ids=str
)
def test_the_body_is_what_torch_computes(sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    (op,) = (op for op in COMPOSITES if str(op) == "aten.kron.default")
    x, y = (torch.randn(size) for size in sizes)
    ours, theirs = COMPOSITES[op](x, y), torch.kron(x, y)
    assert torch.equal(ours, theirs)
    assert ours.stride() == theirs.stride()


def test_it_raises_what_torch_raises() -> None:
    (op,) = (op for op in COMPOSITES if str(op) == "aten.kron.default")
    x, y = torch.randn(3), torch.randn(2, 4).t()
    for f in (torch.kron, COMPOSITES[op]):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            f(x, y)


def _body(name: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The kernel of torch, and what stands for it."""
    return next((op, body) for op, body in COMPOSITES.items() if str(op) == f"aten.{name}.default")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_powers_of_any_dtype(n: int, dtype: torch.dtype) -> None:
    kernel, body = _body("vander")
    x = (torch.randn(n) * 3).to(dtype)
    for columns in (None, 0, 1, 2, 4):
        for increasing in (False, True):
            ours, theirs = (f(x, columns, increasing) for f in (body, kernel))
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("wrap", [False, True])
def test_diagonals_of_any_layout(wrap: bool) -> None:
    kernel, body = _body("fill_diagonal_")
    for shape in ((2, 3), (3, 2), (8, 3), (9, 2), (4, 3), (1, 1), (0, 3), (3, 0), (10, 1), (3, 3, 3), (2, 2, 2, 2)):
        for layout in (lambda t: t, lambda t: t.transpose(0, 1), lambda t: torch.cat([t, t], -1)[..., ::2]):
            ours, theirs = (layout(torch.zeros(shape)) for _ in range(2))
            assert body(ours, 5.0, wrap) is ours
            assert torch.equal(ours, kernel(theirs, 5.0, wrap))
    for refused in ((3,), (), (2, 3, 3)):
        for f in (kernel, body):
            with pytest.raises(RuntimeError, match="dimensions"):
                f(torch.zeros(refused), 5.0, wrap)


def test_products_are_taken_in_eagers_order() -> None:
    """So the results are equal in every bit."""
    for name in ("linalg_multi_dot", "chain_matmul"):
        kernel, body = _body(name)
        for sizes in ((2, 3, 4), (20, 3, 40, 5), (2, 30, 4, 50, 6, 1), (9, 1, 9, 1, 9, 1)):
            chain = [torch.randn(a, b) for a, b in itertools.pairwise(sizes)]
            assert torch.equal(body(chain), kernel(chain))
        for f in (kernel, body):
            with pytest.raises(RuntimeError):
                f([torch.randn(2, 3), torch.randn(3), torch.randn(3, 4)])
