"""Small models whose joint graphs the partitioner is tested on: name → (function, arguments)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Model = tuple[Callable[..., Any], list[Tensor]]


def _args(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(s, requires_grad=True) for s in shapes]


def mlp() -> Model:
    def f(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
        return F.gelu(x @ w1 + b1) @ w2

    return f, _args((8, 16), (16, 32), (32,), (32, 4))


def pointwise() -> Model:
    def f(x: Tensor) -> Tensor:
        return F.gelu(F.gelu(x).sin() * 2).tanh()

    return f, _args((8, 16))


def relu_mlp() -> Model:
    def f(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return F.relu(x @ w1) @ w2

    return f, _args((8, 16), (16, 32), (32, 4))


def layer_norm() -> Model:
    def f(x: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x @ w, (16,), g, b)

    return f, _args((8, 4, 16), (16, 16), (16,), (16,))


def hand_layer_norm() -> Model:
    def f(x: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Tensor:
        h = x @ w
        mean = h.mean(-1, keepdim=True)
        rstd = ((h - mean) ** 2).mean(-1, keepdim=True).add(1e-5).rsqrt()
        return (h - mean) * rstd * g + b

    return f, _args((8, 64), (64, 64), (64,), (64,))


def attention() -> Model:
    def f(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = ((x @ qkv).view(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4)).unbind(0)
        p = ((q @ k.transpose(-1, -2)) * 0.5).softmax(-1)
        return x + (p @ v).transpose(1, 2).reshape(b, t, c) @ out

    return f, _args((2, 8, 16), (16, 48), (16, 16))


def conv_bn() -> Model:
    def f(x: Tensor, w: Tensor, g: Tensor, b: Tensor, w2: Tensor) -> Tensor:
        h = F.conv2d(x, w, padding=1)
        mean = h.mean((0, 2, 3), keepdim=True)
        var = h.var((0, 2, 3), keepdim=True, unbiased=False)
        h = (h - mean) * (var + 1e-5).rsqrt() * g + b
        return F.conv2d(F.relu(h), w2)

    return f, _args((2, 3, 8, 8), (4, 3, 3, 3), (4, 1, 1), (4, 1, 1), (2, 4, 1, 1))


def dropout() -> Model:
    def f(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        keep = torch.rand_like(h) > 0.25
        return (h * keep / 0.75).tanh() @ w

    return f, _args((8, 16), (16, 16))


def embedding() -> Model:
    index = torch.randint(0, 10, (4, 6))

    def f(table: Tensor, w: Tensor, index: Tensor, more: Tensor) -> Tensor:
        h = F.embedding(index, table) @ w
        return h.gather(1, more).sin().sum(1)

    return f, [*_args((10, 16), (16, 16)), index, torch.randint(0, 6, (4, 3, 16))]


def views() -> Model:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = (x @ w).view(4, 2, 16)
        a, b = h.split(1, 1)
        return a.transpose(0, 2).sin() * b.transpose(0, 2), h.reshape(-1)[3:20].cos()

    return f, _args((8, 16), (16, 16))


def swiglu() -> Model:
    def f(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (F.silu(x @ gate) * (x @ up)) @ down

    return f, _args((8, 16), (16, 32), (16, 32), (32, 16))


def two_outputs() -> Model:
    def f(x: Tensor, w: Tensor, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = x @ w
        return h.sigmoid(), (h * h).sum(-1), x.detach().argmax(-1)

    return f, _args((8, 16), (16, 16), (3,))


def blocks(count: int = 4, width: int = 16, rows: int = 32) -> Model:
    """Pre-norm transformer-like blocks with a residual stream."""

    def f(x: Tensor, *weights: Tensor) -> Tensor:
        for k in range(count):
            w1, w2, g = weights[3 * k : 3 * k + 3]
            h = F.layer_norm(x, (width,), g)
            x = x + F.gelu(h @ w1) @ w2
        return x.square().mean()

    shapes = [(width, 4 * width), (4 * width, width), (width,)] * count
    return f, _args((rows, width), *shapes)


def half() -> Model:
    def f(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        h = x.bfloat16() @ w.bfloat16()
        return F.gelu(h.float() * g).bfloat16() @ w.bfloat16()

    return f, _args((8, 16), (16, 16), (16,))


MODELS: dict[str, Callable[[], Model]] = {
    f.__name__: f
    for f in (
        mlp,
        pointwise,
        relu_mlp,
        layer_norm,
        hand_layer_norm,
        attention,
        conv_bn,
        dropout,
        embedding,
        views,
        swiglu,
        two_outputs,
        blocks,
        half,
    )
}
