"""The gallery: one small program for each thing that a wrapper or a kernel can do. Sizes are small and odd on purpose.

Their text is compared, not their numbers: those are the business of tests/programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

F = torch.nn.functional


@dataclass(frozen=True)
class Program:
    """What is compiled, makers of its inputs, and whether sizes are symbols."""

    run: Callable[..., Any]
    inputs: Callable[[], list[Any]]
    dynamic: bool = False


def pointwise(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(x * 2.0 + y) * x


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x + F.relu(x), (96,), w, b)


def reduction_epilogue(x: Tensor) -> Tensor:
    return torch.sqrt(x.square().sum(0) + 1.0)


def concatenation(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x.exp(), y * 3], 1)


def view_output(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.t(), (x + 1).reshape(2, -1)[1]


def mutated_input(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2).add_(y)
    return x.sum(1)


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(24))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.seen


def aliased_outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x.abs()
    return y, y.view(-1), y[1:]


def extern_between(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x * 0.5) @ w + 1.0


def in_place_reuse(x: Tensor, w: Tensor) -> Tensor:
    y = torch.tanh(x) @ w
    return torch.relu(y + 1) @ w + x


def dynamic_rows(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).amax(-1, keepdim=True) * x.shape[0]


def embedding(table: Tensor, rows: Tensor) -> Tensor:
    return table[rows] * 2


def half_precision(x: Tensor) -> Tensor:
    return F.silu(x) + 1


GALLERY: dict[str, Program] = {
    "pointwise": Program(pointwise, lambda: [torch.ones(33, 24), torch.ones(24)]),
    "softmax": Program(softmax, lambda: [torch.ones(7, 129)]),
    "layer_norm": Program(layer_norm, lambda: [torch.ones(4, 9, 96), torch.ones(96), torch.ones(96)]),
    "reduction_epilogue": Program(reduction_epilogue, lambda: [torch.ones(50, 33)]),
    "concatenation": Program(concatenation, lambda: [torch.ones(5, 16), torch.ones(5, 11)]),
    "view_output": Program(view_output, lambda: [torch.ones(6, 8)]),
    "mutated_input": Program(mutated_input, lambda: [torch.ones(6, 40), torch.ones(6, 40)]),
    "mutated_buffer": Program(Counter(), lambda: [torch.ones(16, 24)]),
    "aliased_outputs": Program(aliased_outputs, lambda: [torch.ones(4, 8)]),
    "extern_between": Program(extern_between, lambda: [torch.ones(8, 32), torch.ones(32, 16)]),
    "in_place_reuse": Program(in_place_reuse, lambda: [torch.ones(8, 8), torch.ones(8, 8)]),
    "dynamic_rows": Program(dynamic_rows, lambda: [torch.ones(9, 20), torch.ones(9, 20)], dynamic=True),
    "embedding": Program(embedding, lambda: [torch.ones(100, 24), torch.arange(12).view(3, 4)]),
    "half_precision": Program(half_precision, lambda: [torch.ones(3, 40, dtype=torch.bfloat16)]),
}
