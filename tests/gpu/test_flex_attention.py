"""`flex_attention` on a CUDA device, with gradients, judged by a float64 run. `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import opforge

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:flex_attention called")]

STEPS = 256


def _soft_cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 20 * torch.tanh(score / 20)


def _sliding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 100)


def _program(kind: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    if kind == "soft cap":
        return lambda q, k, v, bias: flex_attention(q, k, v, score_mod=_soft_cap)
    if kind == "bias":
        return lambda q, k, v, bias: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h, i, j])
    mask = create_block_mask(_sliding, None, None, STEPS, STEPS, device="cuda")
    return lambda q, k, v, bias: flex_attention(q, k, v, block_mask=mask)


@pytest.mark.parametrize(
    ("kind", "graphs"),
    [
        ("soft cap", False),  # it is not recorded: its graph holds a tensor on the CPU
        *((kind, graphs) for kind in ("bias", "sliding window") for graphs in (False, True)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_as_accurate_as_eager(kind: str, dtype: torch.dtype, graphs: bool) -> None:
    program = _program(kind)
    torch._dynamo.reset()
    opforge.reset_stats()
    options = {"strict": True, **({"cudagraphs": True} if graphs else {})}
    compiled = torch.compile(program, backend="opforge", options=options)
    torch.manual_seed(0)
    given = [torch.randn(2, 4, STEPS, 64, device="cuda", dtype=dtype) for _ in range(3)]
    given.append(torch.randn(4, STEPS, STEPS, device="cuda", dtype=dtype))

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in given]
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, out.detach().cos(), allow_unused=True)
        return [out.detach(), *(g for g in grads if g is not None)]

    exact, eager = run(program, torch.float64), run(program, dtype)
    for _ in range(4 if graphs else 1):
        found = run(compiled, dtype)
    for ours, theirs, truth in zip(found, eager, exact, strict=True):
        error = float((theirs.double() - truth).abs().max())
        floor = 2 * torch.finfo(dtype).eps * float(truth.abs().max())
        assert float((ours.double() - truth).abs().max()) <= max(2 * error, floor)
    assert opforge.stats()["fallbacks"] == {}
