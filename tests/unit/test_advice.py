"""Warnings about a GPU: said for what is slow there, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opforge.runtime.dispatch.trace import trace
from opforge.runtime.ir.nodes import Program
from opforge.runtime.lower.graph import lower
from opforge.runtime.targets.advice import advice


def program(fn: Callable[..., Any], *inputs: Tensor) -> Program:
    with torch.no_grad():
        return lower(trace(fn, list(inputs)).graph).program


def product(dtype: torch.dtype) -> Program:
    return program(lambda x, y: (x @ y).relu(), *(torch.randn(8, 8).to(dtype) for _ in range(2)))


@pytest.mark.parametrize(
    ("dtype", "capability", "precision", "said"),
    [
        (torch.float32, 90, "highest", "TensorFloat32"),
        (torch.float32, 90, "high", ""),
        (torch.float32, 75, "highest", ""),
        (torch.float64, 90, "highest", ""),
        (torch.bfloat16, 90, "highest", ""),
        (torch.bfloat16, 75, "highest", "capability 7.5"),
        (torch.float16, 75, "highest", ""),
    ],
)
def test_products(dtype: torch.dtype, capability: int, precision: str, said: str) -> None:
    texts = advice(product(dtype), capability, precision)
    assert [said in text for text in texts] == ([True] if said else [])


def test_a_program_without_products() -> None:
    assert advice(program(lambda x: x.sin().sum(), torch.randn(8, 8)), 90, "highest") == []
