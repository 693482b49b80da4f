"""Single values have all the digits of float32: what every point reads is worth them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from opforge.runtime.render.triton_unit import render_triton

from .test_triton_programs import planned


def source(fn: Any, *inputs: Tensor) -> str:
    return render_triton(planned(fn, list(inputs))).source


def test_a_power_of_a_single_value() -> None:
    """As in a bias correction, 1 - 0.999 ** step, which loses what the power has lost a thousand times."""
    text = source(lambda step, x: x * (1 - 0.999**step), torch.ones(()), torch.randn(40))
    assert ".to(tl.float64), " in text


def test_powers_of_many_values() -> None:
    assert "float64" not in source(lambda x, y: x.abs() ** y, torch.randn(40), torch.randn(40))
