"""Small programs of one to a dozen operators, from 8 elements to a few megabytes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Inputs, Program

MICRO: list[Program] = []

Body = Callable[..., Any]


def micro(name: str, shape: str, *make_inputs: Callable[[], Any]) -> Callable[[Body], Body]:
    """Register the decorated function as the micro program `name`, with one maker for each input."""

    def register(fn: Body) -> Body:
        def make() -> tuple[Body, Inputs]:
            return fn, tuple(m() for m in make_inputs)

        MICRO.append(Program(name, "micro", shape, make))
        return fn

    return register


def randn(*size: int, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    return lambda: torch.randn(*size).to(dtype)


def rand(*size: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(*size) + 0.1


def ints(high: int, *size: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, high, size)


@micro("add_relu_8", "8", randn(8), randn(8))
def add_relu_8(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y) * 2.0


@micro("add_relu_4k", "4 x 1024", randn(4, 1024), randn(4, 1024))
def add_relu_4k(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y)


@micro("softmax_rows", "512 x 1024", randn(512, 1024))
def softmax_rows(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


@micro("softmax_8k", "64 x 8192", randn(64, 8192))
def softmax_8k(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


@micro("softmax_columns", "512 x 256 over rows", randn(512, 256))
def softmax_columns(x: Tensor) -> Tensor:
    return torch.softmax(x, 0)


@micro("log_softmax", "256 x 2000", randn(256, 2000))
def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


@micro("layernorm", "512 x 768", randn(512, 768), randn(768), randn(768))
def layernorm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


@micro("residual_layernorm", "256 x 768", randn(256, 768), randn(256, 768), randn(768), randn(768))
def residual_layernorm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    s = x + r
    return s, F.layer_norm(s, (s.shape[-1],), w, b)


@micro("rmsnorm", "512 x 1024", randn(512, 1024), randn(1024))
def rmsnorm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


@micro("groupnorm_silu", "2 x 64 x 32 x 32", randn(2, 64, 32, 32), randn(64), randn(64))
def groupnorm_silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 8, w, b))


@micro(
    "batchnorm_relu",
    "4 x 64 x 56 x 56",
    randn(4, 64, 56, 56),
    randn(64),
    rand(64),
    randn(64),
    randn(64),
)
def batchnorm_relu(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.relu(F.batch_norm(x, mean, var, w, b, False))


@micro("gelu_chain", "512 x 1024", randn(512, 1024), randn(1024))
def gelu_chain(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b) * 0.5 + x


@micro("gelu_tanh", "256 x 3072", randn(256, 3072), randn(3072))
def gelu_tanh(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b, approximate="tanh")


@micro("bf16_gelu", "512 x 1024 bf16", randn(512, 1024, dtype=torch.bfloat16), randn(1024, dtype=torch.bfloat16))
def bf16_gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b)


@micro("swiglu", "256 x 2 x 2048", randn(256, 4096))
def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@micro("rotary", "1 x 8 x 256 x 64", randn(1, 8, 256, 64), randn(256, 64), randn(256, 64))
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


@micro("masked_softmax", "4 x 8 x 128 x 128", randn(4, 8, 128, 128), lambda: torch.rand(4, 1, 1, 128) > 0.2)
def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((scores * 0.125).masked_fill(~mask, -1e9), -1)


@micro("logsumexp", "512 x 1000", randn(512, 1000))
def logsumexp(x: Tensor) -> Tensor:
    return torch.logsumexp(x, -1)


@micro("cross_entropy", "256 x 1000", randn(256, 1000), ints(1000, 256))
def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


@micro("huber_mse", "256 x 1024", randn(256, 1024), randn(256, 1024))
def huber_mse(x: Tensor, y: Tensor) -> Tensor:
    return F.huber_loss(x, y) + 0.5 * F.mse_loss(x, y)


@micro("l2_normalize", "1024 x 384", randn(1024, 384))
def l2_normalize(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


@micro("var_mean", "512 x 1024", randn(512, 1024))
def var_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(x, -1)
    return var, mean


@micro("argmax", "128 x 4096", randn(128, 4096))
def argmax(x: Tensor) -> Tensor:
    return torch.argmax(x * 2 + 1, -1)


@micro("cumsum", "256 x 1024", randn(256, 1024))
def cumsum(x: Tensor) -> Tensor:
    return torch.cumsum(x * 0.5, -1)


@micro("sum_all", "1M", randn(1024, 1024))
def sum_all(x: Tensor) -> Tensor:
    return (x * x).sum()


@micro("column_sum", "2048 x 512", randn(2048, 512))
def column_sum(x: Tensor) -> Tensor:
    return x.sum(0)


@micro("cat_pointwise", "6 x 256 x 128", *[randn(256, 128) for _ in range(6)])
def cat_pointwise(*xs: Tensor) -> Tensor:
    return torch.cat([torch.relu(x) * (i + 1) for i, x in enumerate(xs)], -1)


@micro("transpose_add", "1024 x 512 + transpose", randn(1024, 512), randn(512, 1024))
def transpose_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y.t()


@micro("channels_last_copy", "4 x 64 x 56 x 56", randn(4, 64, 56, 56))
def channels_last_copy(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous()


@micro("outer_broadcast", "1024 x 1024", randn(1024), randn(1024))
def outer_broadcast(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp(-(x[:, None] - y[None, :]).square())


@micro("embedding_mean", "64 bags of 32, 5000 x 128", ints(5000, 64, 32), randn(5000, 128))
def embedding_mean(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table).mean(1)


@micro("index_add", "4096 rows into 1024 x 64", randn(1024, 64), ints(1024, 4096), randn(4096, 64))
def index_add(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
    return torch.index_add(x, 0, index, source)


@micro("where_clamp", "1024 x 512", randn(1024, 512), randn(1024, 512))
def where_clamp(x: Tensor, y: Tensor) -> Tensor:
    z = torch.where(x > y, x * 2, y.clamp(-1.0, 1.0))
    return torch.where(z.abs() < 0.5, z * z, z - 0.25).clamp(max=3.0)


@micro("pool_chain", "4 x 32 x 64 x 64", randn(4, 32, 64, 64))
def pool_chain(x: Tensor) -> Tensor:
    return F.avg_pool2d(F.max_pool2d(torch.relu(x), 3, 2, 1), 2)


@micro("quantize", "512 x 1024 to int8 and back", randn(512, 1024))
def quantize(x: Tensor) -> Tensor:
    scale = 0.03125
    q = torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8)
    return q.to(x.dtype) * scale


@micro("sigmoid_tanh_small", "16 x 64", randn(16, 64), randn(16, 64))
def sigmoid_tanh_small(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.tanh(y) + x
