"""Slices whose bounds are expressions of sizes that change, below zero too: what is read, what is written, and gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opforge

SIZES = ((12, 3), (13, 4), (20, 6), (5, 5), (4, 6), (7, 1), (3, 2))
BOUNDS = (
    "n // 2",
    "-(n // 2)",
    "n - 3",
    "3 - n",
    "m",
    "-m",
    "n - m",
    "n // 3 + 1",
    "-n",
    "-(n // 3)",
    "2",
    "-2",
    "9",
    "-9",
)


pytestmark = pytest.mark.usefixtures("fresh_stats")


def sliced(seed: int) -> str:
    draw = random.Random(seed)
    start, end = (draw.choice([*BOUNDS, ""]) for _ in range(2))
    return f"{start}:{end}:{draw.choice((1, 1, 2, 3))}"


def agree(program: Callable[..., Tensor]) -> None:
    """For all sizes: results, and gradients of both arguments. (The verifier refuses what it cannot prove: that guards keep bounds inside.)"""
    compiled = torch.compile(program, backend="opforge", dynamic=True, options={"debug_verify": False})
    for n, m in SIZES:
        seen: list[list[Any]] = []
        for run in (program, compiled):
            generator = torch.Generator().manual_seed(n)
            leaves = [torch.randn(k, 2, generator=generator).requires_grad_() for k in (n, m)]
            out = run(*leaves)
            weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape)
            seen.append([out, *torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)])
        for ours, eager in zip(seen[1], seen[0], strict=True):
            torch.testing.assert_close(ours, torch.zeros_like(ours) if eager is None and ours is not None else eager)
    assert not any("internal error" in reason for reason in opforge.stats()["fallbacks"])


@pytest.mark.parametrize("seed", range(24))
def test_reads_and_writes(seed: int) -> None:
    read, written = sliced(2 * seed), sliced(2 * seed + 1)
    space: dict[str, Any] = {}
    exec(
        f"""
def program(x, w):
    n, m = x.shape[0], w.shape[0]
    y = x * 1.5
    y[{written}].mul_(w.sum())
    return torch.cat([y[{read}] * 2, y])
""",
        {"torch": torch},
        space,
    )
    agree(space["program"])


def test_what_is_assigned() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = x * 1.0
        k = min(x.shape[0], w.shape[0])
        y[-k:] = w[:k]
        return torch.slice_scatter(y, w[-k:] * 3, 0, -k)

    agree(program)


def test_no_memory_before_a_tensor_is_read() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        k = x.shape[0] // 2 + 1
        return x[-k : -(x.shape[0] // 2)] * 2 + w.sum()

    agree(program)
    assert opforge.stats()["fallbacks"] == {}


def test_steps_through_a_sum_of_sizes() -> None:
    """The size of every second column, rounded up, was not known to be torch's, and slices ran as eager kernels."""

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        both = torch.cat([x, y], 1)
        return both[1::2, ::3].exp(), both[:, ::2] + torch.arange(0, both.shape[1], 2), both[1:-1:2, 2::3] * 2

    compiled = torch.compile(program, backend="opforge", dynamic=True)
    for n, m in ((5, 6), (7, 8), (9, 5)):
        x, y = torch.randn(n, m), torch.randn(n, m + 2)
        torch.testing.assert_close(compiled(x, y), program(x, y))
    stats = opforge.stats()
    assert not stats["fallbacks"]
    assert not stats["externs"], stats["reasons"]
