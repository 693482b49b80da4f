"""Gradients of a loss that its forward computes, and gradients over what was saved, on a GPU: values, and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.gpu

ROWS, CLASSES = 1024, 32064


def plain(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


def in_float32(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


def run(fn: Callable[..., Any], logits: Tensor, targets: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    x = logits.clone().requires_grad_()
    loss = fn(x, targets)
    (grad,) = torch.autograd.grad(loss, x, torch.full_like(loss, factor))
    return loss.detach(), grad


@pytest.mark.parametrize("fn", [plain, in_float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_and_gradients_are_eagers(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    logits = torch.randn(ROWS, CLASSES, device="cuda", dtype=dtype)
    targets = torch.randint(0, CLASSES, (ROWS,), device="cuda")
    targets[::7] = -100
    compiled = torch.compile(fn, backend="opforge", options={"strict": True}, dynamic=False)
    for factor in (1.0, -4.0, 1.0):
        got, eager = run(compiled, logits, targets, factor), run(fn, logits, targets, factor)
        want = run(fn, logits.double(), targets, factor)
        for what, g, e, w in zip(("loss", "gradient"), got, eager, want, strict=True):
            error, allowed = (g.double() - w).norm(), (e.double() - w).norm()
            # A loss is one number, which eager may have rounded by luck to what it is.
            least = torch.finfo(g.dtype).eps if what == "loss" else 1e-6
            assert error <= max(2 * float(allowed), least * float(w.norm())), (
                what,
                factor,
                float(error),
                float(allowed),
            )


@pytest.mark.parametrize("fn", [plain, in_float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_tensor_exists_once(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    logits = torch.randn(ROWS, CLASSES, device="cuda", dtype=dtype).requires_grad_()
    targets = torch.randint(0, CLASSES, (ROWS,), device="cuda")
    compiled = torch.compile(fn, backend="opforge", options={"strict": True}, dynamic=False)
    for _ in range(2):
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        (grad,) = torch.autograd.grad(compiled(logits, targets), logits)
        peak = torch.cuda.max_memory_allocated() - held
        size = grad.numel() * grad.element_size()
        del grad
    assert peak <= 1.05 * size, (peak, size)
