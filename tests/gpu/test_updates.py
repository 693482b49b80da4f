"""Indexed updates and sums of gathered rows on a CUDA device. `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from opforge.runtime import compile_fx

pytestmark = pytest.mark.gpu


def index_copy(c: Tensor, at: Tensor, k: Tensor) -> Tensor:
    c.index_copy_(2, at, k * 2)
    return c.sum(-1)


def assigned(c: Tensor, at: Tensor, k: Tensor) -> Tensor:
    c[:, :, at] = k * 2
    return c.sum(-1)


@pytest.mark.parametrize("cudagraphs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("program", [index_copy, assigned])
def test_a_cache_is_updated_in_place(program: Callable[..., Any], dtype: torch.dtype, cudagraphs: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"strict": True, "debug.verify": True, "cudagraphs": cudagraphs}
    compiled = torch.compile(program, backend="opforge", options=options)
    mine = torch.randn(2, 4, 256, 64, device="cuda", dtype=dtype)
    theirs, address = mine.clone(), mine.data_ptr()
    with torch.no_grad():
        for step in range(6):
            at = torch.tensor([step, 255 - step], device="cuda")
            k = torch.randn(2, 4, 2, 64, device="cuda", dtype=dtype)
            torch.testing.assert_close(compiled(mine, at, k).clone(), program(theirs, at, k))
            assert torch.equal(mine, theirs)
    assert mine.data_ptr() == address
    lines = compile_fx.HISTORY[-1].wrapper.splitlines()
    assert not [line for line in lines if ".copy_(" in line or "empty_strided((2, 4, 256, 64)" in line]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [33, 64, 128])
def test_sums_of_gathered_rows(width: int, dtype: torch.dtype) -> None:
    def program(ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table).sum(1)

    torch._dynamo.reset()
    torch.manual_seed(0)
    table = torch.randn(1000, width, device="cuda", dtype=dtype)
    ids = torch.randint(0, 1000, (777, 32), device="cuda")
    with torch.no_grad():
        got = torch.compile(program, backend="opforge", options={"strict": True})(ids, table)
        want, exact = program(ids, table), program(ids, table.double())
    floor = 2 * torch.finfo(dtype).eps * float(exact.abs().max())
    assert float((got.double() - exact).abs().max()) <= max(2 * float((want.double() - exact).abs().max()), floor)
