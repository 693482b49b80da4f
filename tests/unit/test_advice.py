"""Warnings about a GPU: said for what is slow there, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from opforge.runtime.dispatch.trace import trace
from opforge.runtime.ir.nodes import Program
from opforge.runtime.lower.graph import lower
from opforge.runtime.targets import advice as advice_module
from opforge.runtime.targets.advice import advice, advise


def program(fn: Callable[..., Any], *inputs: Tensor) -> Program:
    with torch.no_grad():
        return lower(trace(fn, list(inputs)).graph).program


def product(dtype: torch.dtype) -> Program:
    return program(lambda x, y: (x @ y).relu(), *(torch.randn(8, 8).to(dtype) for _ in range(2)))


@pytest.mark.parametrize(
    ("dtype", "capability", "tf32", "said"),
    [
        (torch.float32, 90, False, "TensorFloat32"),
        (torch.float32, 90, True, ""),
        (torch.float32, 75, False, ""),
        (torch.float64, 90, False, ""),
        (torch.bfloat16, 90, False, ""),
        (torch.bfloat16, 75, False, "capability 7.5"),
        (torch.float16, 75, False, ""),
    ],
)
def test_products(dtype: torch.dtype, capability: int, tf32: bool, said: str) -> None:
    texts = advice(product(dtype), capability, tf32=tf32)
    assert [said in text for text in texts] == ([True] if said else [])


def test_a_program_without_products() -> None:
    assert advice(program(lambda x: x.sin().sum(), torch.randn(8, 8)), 90, tf32=False) == []


@pytest.fixture
def matmul() -> Iterator[Any]:
    """The precision of products of float32 on a GPU, as it was in the end."""
    yield torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_a_precision_that_was_set_by_its_backend(precision: str, matmul: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's older question about the precision raises then, and every graph for a GPU would run eagerly."""
    said: list[str] = []
    monkeypatch.setattr(advice_module, "warn_once", lambda kind, key, text: said.append(text))
    matmul.fp32_precision = precision
    advise(product(torch.float32), 90)
    assert len(said) == (precision == "ieee")
