"""Numbers among an operator's arguments that its dtype has no place for: eager raises, or computes in a wider dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opforge

Program = Callable[[Tensor, float], Any]
REFUSED: dict[str, Program] = {
    "masked_fill": lambda x, v: x.masked_fill(x > 1, -v),
    "clamp": lambda x, v: x.clamp(max=v),
    "full_like": lambda x, v: torch.full_like(x, v),
    "full": lambda x, v: torch.full((3,), v, dtype=x.dtype) + x,
    "fill_": lambda x, v: x.fill_(v),
    "pad": lambda x, v: F.pad(x, (1, 1), value=v),
    "threshold": lambda x, v: F.threshold(x, 0.5, v),
    "alpha": lambda x, v: torch.add(x, x, alpha=v),
    "scatter": lambda x, v: x.scatter(0, torch.tensor([1]), v),
}
TAKEN: dict[str, Program] = {
    "mul": lambda x, v: x * 1e-9 * v,
    "eq": lambda x, v: x == v,
    "nan_to_num": lambda x, v: x.nan_to_num(v),
}
DTYPES = {torch.float16: 1e9, torch.bfloat16: 1e39, torch.float32: 1e39}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_does_not_convert_is_refused(name: str, dtype: torch.dtype) -> None:
    # A mask of -1e9 in float16 gave -inf.
    program, x = REFUSED[name], torch.tensor([1.0, 2.0, 0.0], dtype=dtype)
    kept = x.clone()
    for f in (program, torch.compile(program, backend="opforge")):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="without overflow"):
            f(x, DTYPES[dtype])
        assert torch.equal(x, kept)
    torch._dynamo.reset()
    opforge.reset_stats()
    run = torch.compile(program, backend="opforge", fullgraph=True)
    torch.testing.assert_close(run(x.clone(), 3.0), program(x.clone(), 3.0))
    assert not opforge.stats()["reasons"]


@pytest.mark.parametrize("name", TAKEN)
def test_what_eager_computes_in_a_wider_dtype_is_computed(name: str) -> None:
    x = torch.tensor([1.0, 2.0, float("nan")], dtype=torch.float16)
    found = torch.compile(TAKEN[name], backend="opforge")(x, 1e9)
    torch.testing.assert_close(found, TAKEN[name](x, 1e9), equal_nan=True)


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_numbers_that_are_no_integers(value: float) -> None:
    x = torch.tensor([1, 2, 0])
    for f in (F.threshold, torch.compile(F.threshold, backend="opforge")):
        with pytest.raises(RuntimeError, match="without overflow"):
            f(x, 1, value)
