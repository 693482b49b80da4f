"""Sums of rows that have one element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opforge.runtime.dispatch.trace import trace
from opforge.runtime.ir.nodes import Nest
from opforge.runtime.ir.verify import verify
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.one_hot import one_hot_sums
from tests.support.ir_interpreter import interpret

N = 7
POSITIONS = torch.tensor([[3], [0], [6], [-1], [7], [-100]])
VALUES = torch.tensor([[1.5], [-2.0], [float("nan")], [4.0], [5.0], [6.0]])


def one(at: Tensor, x: Tensor) -> Tensor:
    return torch.where(at == torch.arange(N), x, 0.0).sum(1, keepdim=True)


def one_and_more(at: Tensor, x: Tensor) -> Tensor:
    """Of bfloat16, with a condition on the row, and the sides of the comparison the other way round."""
    found = (torch.arange(N) == at) & (x > -1)
    return torch.where(found, x.bfloat16(), torch.zeros((), dtype=torch.bfloat16)).sum(1)


def changing(at: Tensor, x: Tensor) -> Tensor:
    """What is chosen depends on the position."""
    return torch.where(at == torch.arange(N), x * torch.arange(N), 0.0).sum(1)


def shifted(at: Tensor, x: Tensor) -> Tensor:
    return torch.where(at == torch.arange(N) + 1, x, 0.0).sum(1)


def ones_elsewhere(at: Tensor, x: Tensor) -> Tensor:
    return torch.where(at == torch.arange(N), x, 1.0).sum(1)


def several(at: Tensor, x: Tensor) -> Tensor:
    return torch.where(at >= torch.arange(N), x, 0.0).sum(1)


def product(at: Tensor, x: Tensor) -> Tensor:
    return torch.where(at == torch.arange(N), x, 0.0).prod(1)


@pytest.mark.parametrize("fn", [one, one_and_more, changing, shifted, ones_elsewhere, several, product])
def test_values_stay(fn: Callable[..., Any]) -> None:
    def both(at: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return fn(at, x), (x + torch.arange(N)).amax(1)

    program = lower(trace(both, (POSITIONS, VALUES)).graph).program
    changed = one_hot_sums(program)
    verify(changed)
    loops = [it.name for it in changed.items if isinstance(it, Nest) and it.reduce is not None]
    assert len(loops) == 2 - (fn in (one, one_and_more))
    got, want = (interpret(p, [POSITIONS, VALUES])[0] for p in (changed, program))
    torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(got, fn(POSITIONS, VALUES), equal_nan=True)


def test_where_rows_are_not_reduced_otherwise() -> None:
    program = lower(trace(one, (POSITIONS, VALUES)).graph).program
    assert one_hot_sums(program) is program
