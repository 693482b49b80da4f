"""Kernels of many costly functions call them: a compiler's time grows faster than a function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import opforge
from opforge.runtime.render import cpp_unit as unit


def _chain(n: int, other: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        for k in range(n):
            x = torch.sin(x) * 1.01 + torch.atan2(x, x + k) * 0.1
        return x, torch.zeros(other + 1)  # no graph is that of another setting

    return f


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_calls_give_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole vectors, a rest, and special values."""
    x = torch.cat(
        [torch.randn(37, dtype=torch.float64) * 3, torch.tensor([0.0, -0.0, 1e9, float("inf"), float("nan")])]
    ).to(dtype)
    found = []
    settings = ((2, unit.MANY, False), (2, 0, True), (9, unit.MANY, True), (9, 10**9, False))
    for k, (n, many, calls) in enumerate(settings):
        monkeypatch.setattr(unit, "MANY", many)
        torch._dynamo.reset()
        found.append(torch.compile(_chain(n, k), backend="opforge")(x)[0])
        source = opforge.last_artifacts().cpp
        assert ("= call_v_sin(" in source) == ("= call_v_atan2(" in source) == calls
        assert source.count("auto call_v_sin(") == calls
    torch.testing.assert_close(found[::2], found[1::2], rtol=0, atol=0, equal_nan=True)
