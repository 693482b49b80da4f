"""Programs of changing sizes and numbers (`benchmarks/recompiles.py`): each is compiled no more often than by a backend that asks nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import opforge
from tests.support.scripts import importable

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
    with importable():
        yield


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in NAMES])
def test_no_guard_is_stricter_than_dynamos(name: str) -> None:
    from recompiles import compilations

    from programs.dynamic import PROGRAMS

    assert list(PROGRAMS) == NAMES
    floor, _ = compilations("dynamo", PROGRAMS[name])
    with opforge.config.patch({"opt_level": "0"}):
        assert compilations("opforge", PROGRAMS[name]) == (floor, "")
