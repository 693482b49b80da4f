"""`scaled_dot_product_attention` with masks on a CUDA device, with gradients, judged by a float64 run. `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opforge

pytestmark = pytest.mark.gpu
Program = Callable[..., Tensor]
HEADS, WIDTH = 4, 64


def both_ways(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """As transformers masks an encoder that it compiles: all is true, and the last stride is 0, which torch's fused kernels refuse."""
    steps = torch.arange(q.shape[2], device=q.device) + 0
    mask = (steps[None, None, :, None] >= 0).expand(q.shape[0], -1, -1, k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, mask)


def causal(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    steps = torch.arange(q.shape[2], device=q.device)
    mask = (steps[None, None, None, :] <= steps[None, None, :, None]).expand(q.shape[0], -1, -1, -1)
    return F.scaled_dot_product_attention(q, k, v, mask)


def padding(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    mask = q.new_ones((), dtype=torch.bool) & kept[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, mask.expand(-1, -1, q.shape[2], -1))


def causal_padding(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    steps = torch.arange(q.shape[2], device=q.device)
    mask = (steps[None, None, None, :] <= steps[None, None, :, None]) & kept[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, mask)


def bias(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, (q[:, :1] @ k[:, :1].mT).tanh())


PROGRAMS: dict[str, Program] = {
    "both ways": both_ways,
    "causal": causal,
    "padding": padding,
    "causal padding": causal_padding,
    "bias": bias,
    "no mask": lambda q, k, v, kept: F.scaled_dot_product_attention(q, k, v),
    "grouped": lambda q, k, v, kept: F.scaled_dot_product_attention(
        q, k[:, :2], v[:, :2], torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device), enable_gqa=True
    ),
}
PLAIN: dict[str, Program] = {
    "both ways": PROGRAMS["no mask"],
    "causal": lambda q, k, v, kept: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "grouped": lambda q, k, v, kept: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
}
"""What a library does where it is not compiled: without a mask. Its kernel is the one that results are judged by, since with the mask torch
computes some of these in float32.
"""


def heads(steps: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(steps)
    q, k, v = (torch.randn(2, HEADS, steps, WIDTH, device="cuda", generator=generator) for _ in range(3))
    lengths = torch.tensor([steps, max(steps // 2, 1)], device="cuda")
    return [q, k, v, torch.arange(steps, device="cuda")[None] < lengths[:, None]]


def results(f: Program, given: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The result, and the gradients of queries, keys and values."""
    leaves = [t.to(dtype).requires_grad_() for t in given[:3]]
    out = f(*leaves, given[3])
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach().cos())]


def compiled(f: Program, dynamic: bool = False) -> Program:
    torch._dynamo.reset()
    opforge.reset_stats()
    return torch.compile(f, backend="opforge", options={"strict": True}, dynamic=dynamic)


def attention_calls() -> list[str]:
    """Operators of attention that are called, as far as they are counted."""
    return sorted(op.removeprefix("aten.") for op in opforge.stats()["externs"] if "attention" in op)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("steps", [64, 197, 256])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients(name: str, steps: int, dtype: torch.dtype) -> None:
    f, given = PROGRAMS[name], heads(steps)
    exact, eager = results(f, given, torch.float64), results(PLAIN.get(name, f), given, dtype)
    call = compiled(f)
    with torch.no_grad():
        out = call(*(t.to(dtype) for t in given[:3]), given[3])
    for ours, theirs, true in zip(
        [out, *results(call, given, dtype)], [eager[0], *eager], [exact[0], *exact], strict=True
    ):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        least = torch.finfo(dtype).eps * true.abs().max()
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max() + least
    assert opforge.stats()["fallbacks"] == {}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_mask_that_says_nothing_takes_the_kernel_without_masks(name: str, dynamic: bool) -> None:
    """The kernel that eager takes for the program that passes none."""
    given = [t.bfloat16() if t.is_floating_point() else t for t in heads(256)]
    with torch.no_grad():
        compiled(PLAIN[name], dynamic)(*given)
        expected = attention_calls()
        compiled(PROGRAMS[name], dynamic)(*given)
    assert attention_calls() == expected
    assert len(expected) == 1
    assert "math" not in expected[0]


@pytest.mark.parametrize("name", ["padding", "causal padding"])
def test_a_mask_of_data_takes_a_fused_kernel(name: str) -> None:
    given = [t.bfloat16() if t.is_floating_point() else t for t in heads(197)]
    with torch.no_grad():
        compiled(PROGRAMS[name])(*given)
    (call,) = attention_calls()
    assert "efficient" in call or "cudnn" in call


def test_a_mask_of_all_heads_is_stored_once() -> None:
    """Of 2,048 steps it would be 512 MB for the heads of all batches."""
    q, k, v = (torch.randn(4, 16, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    kept = torch.arange(2048, device="cuda")[None] < torch.tensor([2048, 1000, 500, 7], device="cuda")[:, None]
    call = compiled(padding)
    with torch.no_grad():
        call(q, k, v, kept)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = call(q, k, v, kept)
        peak = torch.cuda.max_memory_allocated() - before
    assert peak <= out.nbytes + 4 * 2048 * 2048 * 2 * 2
    torch.testing.assert_close(out, padding(q, k, v, kept), atol=2e-2, rtol=2e-2)
