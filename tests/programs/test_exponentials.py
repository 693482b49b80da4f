"""Exponentials from where they overflow to where they round to 0, through subnormal results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.mark.parametrize("function", [torch.exp, torch.exp2])
def test_over_the_whole_range(function: Callable[[Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    inf = float("inf")
    x = torch.cat(
        [
            torch.linspace(-160, 140, 200001),
            torch.tensor([-inf, inf, float("nan"), -104.0, -103.97208, -151.0, -150.0, -149.0]),
        ]
    )
    got = torch.compile(function, backend="opforge", options={"strict": True})(x)
    exact = function(x.double())
    want = exact.float()
    assert torch.equal(got == 0, want == 0)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    finite = want.isfinite()
    unit = torch.exp2(torch.floor(torch.log2(exact[finite].clamp(min=2.0**-126))) - 23)
    assert float(((got.double()[finite] - exact[finite]).abs() / unit).max()) <= 1.5
