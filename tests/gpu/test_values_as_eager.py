"""Values, gradients and written inputs that once differed from eager's on a CUDA device. `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import opforge

pytestmark = pytest.mark.gpu


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    opforge.reset_stats()
    return torch.compile(f, backend="opforge")


def results_and_gradients(f: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result of `f`, what is in the inputs afterwards, and the gradients of those that autograd follows."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    out = f(*leaves)
    followed = [t for t in leaves if t.requires_grad]
    gradients = (
        torch.autograd.grad((out * torch.arange(1, out.numel() + 1, device=out.device).view_as(out)).sum(), followed)
        if followed
        else ()
    )
    return [out.detach(), *(t.detach() for t in leaves), *gradients]


@pytest.mark.parametrize("length", [5, 30, 200, 3000])
@pytest.mark.parametrize("q", [0.0, 0.3, 0.5, 1.0])
def test_gradient_of_quantile_with_ties(length: int, q: float) -> None:
    x = torch.randint(3, (16, length), device="cuda").float().requires_grad_()
    program = lambda x: torch.quantile(x, q, dim=-1)  # noqa: E731
    for ours, theirs in zip(
        results_and_gradients(compiled(program), x), results_and_gradients(program, x), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradients[0] * b, gradients[0] * a * 3


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        a.mul_(2)
        ctx.mark_dirty(a)
        return a

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Counted(torch.autograd.Function):
    """Writes an argument in its forward of which autograd is told nothing."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return a * count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * 5, None


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one tensor twice": lambda x, c: Product.apply(x, x) + 1,
    "one computed tensor twice": lambda x, c: Product.apply(y := x.sin(), y) + 1,
    "an input and its view": lambda x, c: Product.apply(x, x.view_as(x)) + 1,
    "a write in place": lambda x, c: Doubled.apply(x * 1) + 1,
    "a write in place between readers": lambda x, c: (y := x * 1) + Doubled.apply(x + 2) + y,
    "a write to another argument": lambda x, c: Counted.apply(x, c) + 1,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_custom_functions(name: str) -> None:
    """Beside eager, or where Dynamo's own program is wrong (one tensor given twice, torch 2.11) beside that program run by eager."""
    program = FUNCTIONS[name]
    if "twice" in name:
        torch._dynamo.reset()
        program = torch.compile(program, backend="eager")
    x, count = torch.randn(6, 10, device="cuda", requires_grad=True), torch.zeros(10, device="cuda")
    expected = results_and_gradients(program, x, count)
    for ours, theirs in zip(results_and_gradients(compiled(FUNCTIONS[name]), x, count), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


HUGE: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(x.shape[0], device=x.device) % x.shape[1]),
    "std": lambda x: x.std(-1),
    "var": lambda x: x.var(-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "norm": lambda x: x.norm(dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "softmin of columns": lambda x: x.softmax(0),
}


@pytest.mark.parametrize("scale", [1e30, 1e-30])
@pytest.mark.parametrize("length", [2, 100, 5000])
@pytest.mark.parametrize("name", HUGE)
def test_huge_and_tiny_values(name: str, length: int, scale: float) -> None:
    """Every element is as near to a float64 run as eager's, which overflows here and there."""
    torch.manual_seed(0)
    program = HUGE[name]
    x = ((torch.rand(8, length, device="cuda") * 2 - 1) * scale).requires_grad_()
    ours, theirs = results_and_gradients(compiled(program), x), results_and_gradients(program, x)
    exact = results_and_gradients(program, x.detach().double().requires_grad_())
    for a, b, truth in zip(ours, theirs, exact, strict=True):
        scale_of_result = float(truth.abs().max())
        error, allowed = ((t.double() - truth).abs().nan_to_num(torch.inf, torch.inf) for t in (a, b))
        assert bool((error <= 2 * allowed.max() + 1e-6 * scale_of_result).all())
