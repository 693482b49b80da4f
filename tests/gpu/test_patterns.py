"""Attention that a program writes out, and activations of products, on a CUDA device: torch's kernels, and eager's numbers and NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import opforge
from tests.programs.test_attention_patterns import (
    SHAPES,
    UNMASKED,
    added,
    chosen,
    chosen_otherwise,
    filled,
    gelu_new,
    queries_keys_values,
    visible,
)

pytestmark = pytest.mark.gpu

INF = float("inf")
ATTENTION, ACTIVATION = "aten.scaled_dot_product_attention.default", "aten._addmm_activation.default"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(kernel: str, f: Callable[..., Tensor], *args: Tensor, **options: Any) -> Tensor:
    """As near to float64 as eager, NaN where eager has NaN, and one call of the kernel."""
    torch._dynamo.reset()
    opforge.reset_stats()
    with torch.no_grad():
        run = torch.compile(f, backend="opforge", options={"strict": True, **options}, dynamic=False)
        for _ in range(4 if options else 1):
            got = run(*args)
        want = f(*args)
        exact = f(*(a.double() if a.is_floating_point() else a for a in args))
    assert opforge.stats()["externs"].get(kernel, 0) == 1
    assert (got.shape, got.dtype, got.stride(), got.device) == (want.shape, want.dtype, want.stride(), want.device)
    assert torch.equal(got.isnan(), want.isnan())
    floor = 2 * torch.finfo(want.dtype).eps * float(exact.nan_to_num().abs().max())
    error, eager = (float((x.double() - exact).nan_to_num().abs().max()) for x in (got, want))
    assert error <= max(2 * eager, floor), (error, eager)
    return got


def on_gpu(dtype: torch.dtype) -> list[Tensor]:
    return [x.cuda() for x in queries_keys_values(dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNMASKED)
def test_attention(name: str, dtype: torch.dtype) -> None:
    check(ATTENTION, UNMASKED[name], *on_gpu(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_with_a_mask(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A row of which nothing is left is NaN where the fill is -inf, and the mean of the values where it is finite."""
    qkv, m = on_gpu(dtype), visible(*shape).cuda()
    bias = torch.randn(shape, device="cuda").to(dtype)
    check(ATTENTION, added, *qkv, bias)
    assert check(ATTENTION, added, *qkv, bias.masked_fill(~m, -INF)).isnan().any()
    for f in (filled(-INF), chosen):
        assert check(ATTENTION, f, *qkv, m).isnan().any()
    if dtype != torch.float16:
        for f in (filled(-1e9), chosen_otherwise):
            assert not check(ATTENTION, f, *qkv, m).isnan().any()


@pytest.mark.parametrize("keys", [1, 7, 130, 1001])
def test_attention_with_a_mask_of_odd_width(keys: int) -> None:
    """Rows of the mask that do not begin at whole vectors."""
    q, k, v = (torch.randn(2, n, 64, device="cuda").bfloat16() for n in (33, keys, keys))
    check(ATTENTION, added, q, k, v, torch.randn(33, keys, device="cuda").bfloat16())
    check(ATTENTION, filled(-INF), q, k, v, visible(33, keys).cuda())


def test_attention_is_recorded() -> None:
    opforge.reset_stats()
    check(ATTENTION, UNMASKED["plain"], *on_gpu(torch.bfloat16), cudagraphs=True)
    assert opforge.stats()["unrecorded"] == {}


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": gelu_new,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 64), (2, 100, 64), (130, 61)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, b = (torch.randn(s, device="cuda").to(dtype) for s in (shape, (96, shape[-1]), (96,)))
    check(ACTIVATION, lambda x, w, b: ACTIVATIONS[name](F.linear(x, w, b)), x, w, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_of_nan_and_infinities(name: str, dtype: torch.dtype) -> None:
    """A NaN stays one: a maximum with 0 that takes the number instead would lose it."""
    x, w, b = (torch.ones(s, device="cuda").to(dtype) for s in ((16, 64), (96, 64), (96,)))
    x[1, 3], x[2, 3], x[3, 3], b[5] = float("nan"), INF, -INF, float("nan")
    with torch.no_grad():
        f = lambda x, w, b: ACTIVATIONS[name](F.linear(x, w, b))  # noqa: E731
        got = torch.compile(f, backend="opforge", options={"strict": True}, dynamic=False)(x, w, b)
        torch.testing.assert_close(got, f(x, w, b), equal_nan=True)
