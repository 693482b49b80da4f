"""Triton kernels that a program launches itself, on a CUDA device: values, written inputs, gradients, recorded graphs. `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

pytest.importorskip("triton", reason="C8: Triton is not installed")

import triton
import triton.language as tl

import opforge
from opforge.tests.support import user_kernels as made

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _a_device() -> None:
    assert made.DEVICE == "cuda"


@pytest.mark.parametrize("name", made.PROGRAMS)
def test_as_eager(name: str) -> None:
    assert made.compare(made.PROGRAMS[name], False) == ""


@pytest.mark.parametrize("name", [name for name, program in made.PROGRAMS.items() if program.sized])
def test_with_symbolic_sizes(name: str) -> None:
    assert made.compare(made.PROGRAMS[name], True) == ""


@pytest.mark.parametrize("name", made.OTHERS)
def test_other_ways(name: str) -> None:
    assert made.OTHERS[name]() == ""


RECORDED = [name for name in made.PROGRAMS if name not in ("in a branch", "without results", "no elements")]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded(name: str) -> None:
    """In a CUDA graph, with inputs that have new contents at each call."""
    program = made.PROGRAMS[name]
    torch._dynamo.reset()
    opforge.reset_stats()
    options = {"strict": True, "cudagraphs": True}
    compiled = torch.compile(program.run, backend="opforge", fullgraph=True, options=options)
    torch.manual_seed(0)
    given = [torch.empty(5, 7, device="cuda", requires_grad=program.grad) for _ in range(2)]
    for _ in range(6):
        with torch.no_grad():
            for t in given:
                t.copy_(torch.rand(5, 7) + 0.1)
        alike = [t.detach().clone().requires_grad_(program.grad) for t in given]
        found, expected = _run(compiled, given, program.grad), _run(program.run, alike, program.grad)
        torch.testing.assert_close((found, given), (expected, alike), rtol=1e-5, atol=1e-5)
        del found
    stats = opforge.stats()
    assert stats["fallbacks"] == {}
    assert stats["unrecorded"] == {}
    assert stats["recordings"] >= 1


def _run(function: Callable[..., Any], leaves: list[Tensor], grad: bool) -> list[Tensor]:
    """Results and gradients."""
    with torch.set_grad_enabled(grad):
        out = [t for t in pytree.tree_leaves(function(*leaves)) if t is not None]
    grads = torch.autograd.grad(sum((t * t.detach().cos()).sum() for t in out), leaves) if grad else ()
    return [*(t.detach() for t in out), *grads]


@triton.jit
def _norm(x, weight, out, scale, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(value * value, 0) / width + 1e-6)
    tl.store(scale + row, r)
    w = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, value * r * w, mask=at < width)


@triton.jit
def _norm_gradient(x, weight, scale, g, dx, dw, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    grad = tl.load(g + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    r = tl.load(scale + row)
    inner = tl.sum(value * grad * w, 0) / width
    tl.store(dx + row * width + at, r * (grad * w - value * r * r * inner), mask=at < width)
    tl.store(dw + row * width + at, grad * value * r, mask=at < width)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        rows, width = x.shape
        out, scale = torch.empty_like(x), torch.empty(rows, device=x.device)
        _norm[(rows,)](x, weight, out, scale, width, BLOCK=triton.next_power_of_2(width), num_warps=2)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        dx, dw = torch.empty_like(x), torch.empty(x.shape, device=x.device)
        block = triton.next_power_of_2(x.shape[1])
        _norm_gradient[(x.shape[0],)](x, weight, scale, g.contiguous(), dx, dw, x.shape[1], BLOCK=block)
        return dx, dw.sum(0).to(weight.dtype)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(96, 200), nn.Linear(200, 96)
        self.weight = nn.Parameter(torch.ones(200))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.nn.functional.gelu(_RMSNorm.apply(self.first(x).relu(), self.weight))) + x


def _train(wrap: Callable[[nn.Module], Callable[..., Tensor]], dtype: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    net = _Net().cuda().to(dtype)
    run = wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses = []
    for _ in range(12):
        x = torch.randn(64, 96, device="cuda", dtype=dtype)
        optimizer.zero_grad()
        loss = (run(x) - x.roll(1, 0)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_training(dtype: torch.dtype, graphs: bool) -> None:
    """A norm of the program's own, forward and backward, between layers that are compiled."""
    torch._dynamo.reset()
    opforge.reset_stats()
    options = {"strict": True, **({"cudagraphs": True} if graphs else {})}
    expected = _train(lambda net: net, dtype)
    found = _train(lambda net: torch.compile(net, backend="opforge", fullgraph=True, options=options), dtype)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-5)
    stats = opforge.stats()
    assert stats["fallbacks"] == {}
    assert stats["unrecorded"] == {}
    assert not graphs or stats["recordings"] >= 2


def test_written_while_others_read() -> None:
    """A long chain around launches, in memory that is used again."""

    def program(x: Tensor) -> Tensor:
        for k in range(8):
            y = (x + k).sin() * 0.25  # whatever x is off by is less in the result
            made.double[(triton.cdiv(y.numel(), 32),)](y, y.numel(), BLOCK=32)
            z = y.softmax(-1)
            made.double[(triton.cdiv(z.numel(), 32),)](z, z.numel(), BLOCK=32)
            x = x * 0.5 + y + z
        return x

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="opforge", fullgraph=True, options={"strict": True})
    x = torch.randn(333, 257, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), program(x), rtol=1e-4, atol=1e-5)


def test_half_precision() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        made.double[(triton.cdiv(y.numel(), 32),)](y, y.numel(), BLOCK=32)
        return y.relu()

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="opforge", fullgraph=True, options={"strict": True})
    x, w = (torch.randn(128, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, w), program(x, w))


def test_another_stream() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(made.an_input_twice, backend="opforge", fullgraph=True, options={"strict": True})
    given = made.inputs()
    ours, theirs = ([t.clone() for t in given] for _ in range(2))
    with torch.no_grad():
        compiled(*(t.clone() for t in given))
        made.an_input_twice(*theirs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compiled(*ours)
        stream.synchronize()
    torch.testing.assert_close(ours, theirs)


def test_descriptors_of_tensors() -> None:
    """Whatever Dynamo makes of them: the results are eager's."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("C1: descriptors need a GPU of capability 9.0")
    from triton.tools.tensor_descriptor import TensorDescriptor

    def program(x: Tensor) -> Tensor:
        y, out = x * 2, torch.empty_like(x)
        _copy_blocks[(2, 2)](TensorDescriptor.from_tensor(y, [32, 32]), TensorDescriptor.from_tensor(out, [32, 32]))
        return out + 1

    torch._dynamo.reset()
    x = torch.randn(64, 64, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(program, backend="opforge")(x), x * 2 + 1)


@triton.jit
def _copy_blocks(source, target):  # type: ignore[no-untyped-def]
    i, j = tl.program_id(0) * 32, tl.program_id(1) * 32
    target.store([i, j], source.load([i, j]))
