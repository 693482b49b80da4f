"""Programs whose time is that of moving their data: on a GPU the copy bandwidth is their limit. Sizes are far beyond the caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Body = Callable[..., Any]
Maker = Callable[[torch.device], Any]
ATEN = torch.ops.aten


@dataclass(frozen=True)
class BoundProgram:
    """One program: the function, what makes its inputs on a device, and the bytes that it must move at least.

    moved  bytes, from inputs and results; None: all inputs are read once, all results written once.
    """

    name: str
    shape: str
    fn: Body
    inputs: tuple[Maker, ...]
    moved: Callable[[list[Tensor], list[Tensor]], int] | None = None


BOUND: dict[str, BoundProgram] = {}


def bound(name: str, shape: str, *inputs: Maker, moved: Any = None) -> Callable[[Body], Body]:
    """Register the decorated function."""

    def register(fn: Body) -> Body:
        BOUND[name] = BoundProgram(name, shape, fn, inputs, moved)
        return fn

    return register


def randn(*size: int, dtype: torch.dtype = torch.float32) -> Maker:
    return lambda device: torch.randn(*size, device=device).to(dtype)


def half(*size: int) -> Maker:
    return randn(*size, dtype=torch.bfloat16)


def ints(high: int, *size: int, dtype: torch.dtype = torch.int64) -> Maker:
    return lambda device: torch.randint(0, high, size, device=device, dtype=dtype)


def size_of(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@bound("gelu_chain", "8192 x 8192 bf16", half(8192, 8192))
def gelu_chain(x: Tensor) -> Tensor:
    return F.gelu(x * 1.5 + 0.5) * x


@bound("swiglu", "8192 x 2 x 4096 bf16", half(8192, 8192))
def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@bound("bias_gelu_residual", "8192 x 4096 bf16", half(8192, 4096), half(4096), half(8192, 4096))
def bias_gelu_residual(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.gelu(x + bias) + residual


@bound("dropout_add", "8192 x 4096 bf16", half(8192, 4096), half(8192, 4096))
def dropout_add(x: Tensor, residual: Tensor) -> Tensor:
    return F.dropout(x, 0.1) + residual


@bound("softmax_1k", "65536 x 1024 bf16", half(65536, 1024))
def softmax_1k(x: Tensor) -> Tensor:
    return x.softmax(-1)


@bound("softmax_8k", "8192 x 8192", randn(8192, 8192))
def softmax_8k(x: Tensor) -> Tensor:
    return x.softmax(-1)


@bound("log_softmax_50k", "2048 x 50304", randn(2048, 50304))
def log_softmax_50k(x: Tensor) -> Tensor:
    return F.log_softmax(x, -1)


@bound("masked_softmax", "8 x 16 x 1024 x 1024 bf16", half(8, 16, 1024, 1024), ints(2, 1024, 1024))
def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask == 0, float("-inf")).softmax(-1).nan_to_num(0)


@bound("layer_norm", "16384 x 4096 bf16", half(16384, 4096), half(4096), half(4096))
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (4096,), weight, bias)


@bound("residual_rms_norm", "16384 x 4096 bf16", half(16384, 4096), half(16384, 4096), half(4096))
def residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = (x + residual).float()
    return (y * torch.rsqrt(y.square().mean(-1, True) + 1e-6)).to(x.dtype) * weight, y.to(x.dtype)


@bound(
    "layer_norm_backward", "16384 x 2048",
    randn(16384, 2048), randn(16384, 2048), randn(16384, 1), lambda d: torch.rand(16384, 1, device=d) + 0.5, randn(2048),
)  # fmt: skip
def layer_norm_backward(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return ATEN.native_layer_norm_backward(dy, x, [2048], mean, rstd, weight, weight, [True, True, True])


@bound("group_norm_silu", "16 x 128 x 128 x 128", randn(16, 128, 128, 128), randn(128), randn(128))
def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32, weight, bias))


@bound(
    "batch_norm_relu", "32 x 256 x 56 x 56",
    randn(32, 256, 56, 56), randn(256), lambda d: torch.rand(256, device=d) + 0.5, randn(256), randn(256),
)  # fmt: skip
def batch_norm_relu(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, mean, var, weight, bias))


@bound("transpose_add", "8192 x 8192", randn(8192, 8192), randn(8192, 8192))
def transpose_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y.t()


@bound("channels_last", "32 x 128 x 64 x 64", randn(32, 128, 64, 64))
def channels_last(x: Tensor) -> Tensor:
    return (x * 2).contiguous(memory_format=torch.channels_last)


@bound("cat_pointwise", "6 x 4096 x 2048", *(randn(4096, 2048) for _ in range(6)))
def cat_pointwise(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Tensor:
    return torch.cat([a.relu(), b.sigmoid(), c * 2, d.tanh(), e + 1, f.neg()], 1)


@bound("column_sum", "65536 x 1024", randn(65536, 1024))
def column_sum(x: Tensor) -> Tensor:
    return x.sum(0)


@bound("sum_all", "64M", randn(64 << 20))
def sum_all(x: Tensor) -> Tensor:
    return x.sum()


@bound("var_mean", "16384 x 4096", randn(16384, 4096))
def var_mean(x: Tensor) -> tuple[Tensor, ...]:
    return torch.var_mean(x, -1)


@bound("argmax", "2048 x 32000", randn(2048, 32000))
def argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)


@bound("cumsum", "8192 x 8192", randn(8192, 8192))
def cumsum(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def _rows_moved(inputs: list[Tensor], results: list[Tensor]) -> int:
    return 2 * size_of(results) + size_of([t for t in inputs if not t.is_floating_point()])


@bound("embedding", "32768 of 50304 x 1024 bf16", ints(50304, 32768), half(50304, 1024), moved=_rows_moved)
def embedding(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table) * 2


@bound("index_add", "1M rows of 64 into 65536", randn(65536, 64), ints(65536, 1 << 20), randn(1 << 20, 64))
def index_add(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return x.index_add(0, index, rows)


@bound("cross_entropy", "4096 x 50304", randn(4096, 50304), ints(50304, 4096))
def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target)


@bound("kl_divergence", "4096 x 32000", randn(4096, 32000), randn(4096, 32000))
def kl_divergence(x: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(x, -1), F.log_softmax(y, -1), reduction="batchmean", log_target=True)


@bound("dequantize", "8192 x 8192 int8", ints(127, 8192, 8192, dtype=torch.int8), randn(8192, 1))
def dequantize(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * scale).to(torch.bfloat16)


@bound("quantize_rows", "8192 x 8192 bf16", half(8192, 8192))
def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round().to(torch.int8), scale


@bound("rotary", "8 x 32 x 2048 x 128 bf16", half(8, 32, 2048, 128), half(2048, 128), half(2048, 128))
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@bound("where_clamp", "8192 x 8192", randn(8192, 8192), randn(8192, 8192))
def where_clamp(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x > y, x.clamp(-1, 1), y * 0.5)


@bound("huber", "8192 x 8192", randn(8192, 8192), randn(8192, 8192))
def huber(x: Tensor, y: Tensor) -> Tensor:
    return F.huber_loss(x, y)


@bound("max_pool", "32 x 64 x 112 x 112", randn(32, 64, 112, 112))
def max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2, 1)


def _adamw_moved(inputs: list[Tensor], results: list[Tensor]) -> int:
    return 7 * size_of(inputs) // 4  # parameter, gradient and two states are read; all but the gradient written


@bound("adamw", "200 x 512 x 512", *(randn(512, 512) for _ in range(800)), moved=_adamw_moved)
def adamw(*tensors: Tensor) -> tuple[Tensor, ...]:
    parameters, gradients, firsts, seconds = (tensors[k : k + 200] for k in range(0, 800, 200))
    decayed = torch._foreach_mul(parameters, 0.999)
    means = torch._foreach_lerp(firsts, gradients, 0.1)
    squares = torch._foreach_addcmul(
        torch._foreach_mul(torch._foreach_abs(seconds), 0.999), gradients, gradients, 0.001
    )
    steps = torch._foreach_add(torch._foreach_sqrt(squares), 1e-8)
    return (*torch._foreach_addcdiv(decayed, means, steps, -1e-3), *means, *squares)
