"""Joint graphs of any size, written node by node: tracing thousands of nodes would take longer than cutting them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

OPS = torch.ops.aten


class Writer:
    """A joint graph under construction; every value has the shape (64, 64)."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.value = torch.empty(64, 64, device="meta")
        self.backward = False

    def input(self, name: str, *, tangent: bool = False) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta = {"val": self.value, **({"tangent": True} if tangent else {})}
        return node

    def __call__(self, op: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(op, args)
        node.meta = {"val": self.value, **({"backward": True} if self.backward else {})}
        return node

    def finish(self, outputs: list[fx.Node], gradients: list[fx.Node | None]) -> fx.GraphModule:
        self.graph.output((tuple(outputs), tuple(gradients)))
        return fx.GraphModule(torch.nn.Module(), self.graph)


def residual_chain(nodes: int, *, matmul: bool = True) -> fx.GraphModule:
    """x = x + gelu(x @ w) (or x = x + gelu(sin(x))), as many layers as give about `nodes` nodes; one primal, one output."""
    w = Writer()
    x = first = w.input("x")
    weight = w.input("w")
    grad = w.input("g", tangent=True)
    layers = nodes // (8 if matmul else 7)
    kept = []
    for _ in range(layers):
        h = w(OPS.mm.default, x, weight) if matmul else w(OPS.sin.default, x)
        y = w(OPS.gelu.default, h)
        kept.append((x, h))
        x = w(OPS.add.Tensor, x, y)
    w.backward = True
    total = None
    for before, h in reversed(kept):
        inner = w(OPS.gelu_backward.default, grad, h)
        if matmul:
            part = w(OPS.mm.default, w(OPS.t.default, before), inner)
            total = part if total is None else w(OPS.add.Tensor, total, part)
            inner = w(OPS.mm.default, inner, w(OPS.t.default, weight))
        else:
            inner = w(OPS.mul.Tensor, inner, w(OPS.cos.default, before))
        grad = w(OPS.add.Tensor, grad, inner)
    assert first is kept[0][0]
    return w.finish([x], [grad, total])


def braid(nodes: int) -> fx.GraphModule:
    """Heavy values joined again and again by cheap ones, every tenth of which the backward wants: one large cut."""
    w = Writer()
    a, weight, grad = w.input("x"), w.input("w"), w.input("g", tangent=True)
    row = [w(OPS.mm.default, a, weight)]
    for k in range(nodes // 3):
        one, two = row[-1], row[max(0, len(row) - 2 - k % 5)]
        row.append(w(OPS.mm.default, one, weight) if k % 7 == 0 else w(OPS.mul.Tensor, one, two))
    out = row[-1]
    w.backward = True
    for k, node in enumerate(reversed(row)):
        if k % 3 == 0:
            grad = w(OPS.mul.Tensor, grad, node)
    return w.finish([out], [grad, None])
