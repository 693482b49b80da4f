"""Programs of changing sizes and numbers (`benchmarks/recompiles.py`): each is compiled no more often than by a backend that asks nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import opforge

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = [
    "mlp",
    "mlp, marked",
    "batches of 1 and 0",
    "batches of 1 and 0, automatic",
    "attention",
    "scaled_dot_product_attention",
    "transformer block",
    "embedding",
    "key-value cache",
    "heads",
    "convolutions",
    "training",
    "padded to eight",
    "halves",
    "joined",
    "strides",
    "broadcast",
    "numbers",
    "number of columns",
    "real numbers",
    "nonzero",
    "masked_select",
    "item",
    "repeat_interleave",
    "upsampled",
    "batch norm",
]
FEW = ("batches of 1 and 0", "halves", "strides", "number of columns", "masked_select")


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The folder of scripts, which import each other by name."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in NAMES])
def test_no_guard_is_stricter_than_dynamos(name: str) -> None:
    from recompiles import compilations

    from programs.dynamic import PROGRAMS

    assert list(PROGRAMS) == NAMES
    floor, _ = compilations("dynamo", PROGRAMS[name])
    with opforge.config.patch({"opt_level": "0"}):
        assert compilations("opforge", PROGRAMS[name]) == (floor, "")
