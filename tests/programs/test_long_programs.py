"""Programs that repeat themselves: one piece of code for all of it, also with symbolic sizes, and eager's values."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opforge.runtime.compile_fx import HISTORY


def joined(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in torch._foreach_mul(torch._foreach_add(a, b, alpha=0.5), 3.0)])


def pairs(shapes: list[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
    g = torch.Generator().manual_seed(len(shapes))
    return tuple([torch.randn(shape, generator=g) for shape in shapes] for _ in range(2))  # type: ignore[return-value]


def test_a_concatenation_of_many_symbolic_sizes_is_a_loop_for_each() -> None:
    """80 tensors took 57 s of the C++ compiler: each point chose between all of them, by divisions."""
    torch._dynamo.reset()
    compiled = torch.compile(joined, backend="opforge", dynamic=True)
    for shapes in (
        [(3 + k, 20 + 2 * k) for k in range(24)],
        [(2 + 5 * k % 7, 30 + k) for k in range(24)],
        [(300 - 7 * k, 150 + k) for k in range(24)],
    ):
        args = pairs(shapes)
        torch.testing.assert_close(compiled(*args), joined(*args), rtol=1e-6, atol=1e-6)
    source = HISTORY[-1].cpp
    assert len(re.findall(r"^static .*_piece\d+\(", source, re.MULTILINE)) == 2  # the first begins at 0
    assert len(re.findall(r"^    \w+_piece\d+\(", source, re.MULTILINE)) == 24
    assert "floormod" not in source
    assert "select(" not in source


def test_equal_sizes_are_cut_in_order_too() -> None:
    """All tensors have one size: the places of the cuts are its multiples."""
    torch._dynamo.reset()

    def program(xs: list[Tensor], y: Tensor) -> Tensor:
        return torch.cat([x + y for x in xs]) * 2

    compiled = torch.compile(program, backend="opforge", dynamic=True)
    for n in (7, 19, 2):
        xs, y = [torch.randn(n) + k for k in range(20)], torch.randn(n)
        torch.testing.assert_close(compiled(xs, y), program(xs, y), rtol=1e-6, atol=1e-6)
    assert len(re.findall(r"^    \w+_piece\d+\(", HISTORY[-1].cpp, re.MULTILINE)) == 20


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_stack_of_different_pieces(dim: int, dynamic: bool) -> None:
    """None of these functions takes the place where its piece begins, yet their caller added that place up without declaring it."""
    torch._dynamo.reset()

    def program(xs: list[Tensor]) -> Tensor:
        return torch.stack([x * k + x.tanh() for k, x in enumerate(xs)], dim)

    compiled = torch.compile(program, backend="opforge", dynamic=dynamic, options={"strict": True})
    for rows, columns in ((5, 9), (16, 128)):
        xs = [torch.randn(rows, columns) for _ in range(24)]
        torch.testing.assert_close(compiled(xs), program(xs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [3, 20])
@pytest.mark.parametrize(
    "program",
    [
        lambda xs: torch.cat([x.exp() for x in xs], 1),
        lambda xs: torch.cat([torch.nn.functional.pad(x, (1, 2)) for x in xs], 1).sum(0),
        lambda xs: torch.cat([x.roll(1, 1) for x in xs], 1) + 1,
        lambda xs: torch.cat([x[:, 1:] for x in xs], 1).flip(1),
        lambda xs: torch.cat([x.to(torch.float64) for x in xs], 1).softmax(1),
    ],
    ids=["pointwise", "padded", "rolled", "sliced", "softmax"],
)
def test_columns_of_symbolic_sizes(program: Callable[[Any], Tensor], count: int) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="opforge", dynamic=True)
    for rows, width in ((5, 9), (33, 4), (2, 40)):
        xs = [torch.randn(rows, width + 3 * k % 11) for k in range(count)]
        torch.testing.assert_close(compiled(xs), program(xs), rtol=1e-5, atol=1e-6)


class Dense(nn.Module):
    """Layers of which each reads the results of all before it (Huang et al. 2017)."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        channels = [5 + 3 * k for k in range(layers)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in channels)
        self.products = nn.ModuleList(nn.Conv2d(c, 3, 1) for c in channels)

    def forward(self, x: Tensor) -> Tensor:
        maps = [x]
        for norm, product in zip(self.norms, self.products, strict=True):
            maps.append(product(norm(torch.cat(maps, 1)).relu()))
        return torch.cat(maps, 1)


@pytest.mark.parametrize("training", [False, True])
def test_layers_with_other_numbers_of_channels_share_their_code(training: bool) -> None:
    lengths = []
    for layers in (8, 16):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Dense(layers).train(training)
        judge = copy.deepcopy(model).double()
        compiled = torch.compile(model, backend="opforge", dynamic=True)
        for shape in ((2, 5, 7, 9), (3, 5, 4, 6)):
            x = torch.randn(shape, requires_grad=training)
            exact = x.detach().double().requires_grad_(training)
            with torch.set_grad_enabled(training):
                got, want = compiled(x), judge(exact)
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
            if training:
                weight = torch.randn(shape[0], 1, *shape[2:])
                (got * weight).sum().backward()
                (want * weight.double()).sum().backward()
                torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-3, atol=1e-4)
        for a, b in zip(model.parameters(), judge.parameters(), strict=True):
            if training:
                torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-3, atol=1e-3)
        for a, b in zip(model.buffers(), judge.buffers(), strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)
        assert "_shared(" in HISTORY[-1].cpp
        lengths.append(len(HISTORY[-1].cpp.splitlines()))
    assert lengths[1] < 2 * lengths[0], lengths


def test_the_steps_of_an_unrolled_cell_share_their_code() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    cell = torch.nn.GRUCell(8, 8)

    def unrolled(x: Tensor, h: Tensor) -> Tensor:
        for k in range(12):
            h = cell(x[k], h)
        return h.sum()

    x, h = torch.randn(12, 4, 8), torch.zeros(4, 8)
    got = torch.autograd.grad(torch.compile(unrolled, backend="opforge")(x, h), list(cell.parameters()))
    want = torch.autograd.grad(unrolled(x, h), list(cell.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    made = HISTORY[-1]
    assert made.cpp.count('extern "C"') < 10 < made.kernels
