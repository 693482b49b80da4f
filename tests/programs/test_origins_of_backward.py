"""Nodes and kernels of a backward say the line of the forward that they are the derivative of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import opforge


def several_lines(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    z = y.exp() * 2
    return z.sum()


def layers(x: torch.Tensor) -> torch.Tensor:
    h = nn.functional.layer_norm(x, (4,))
    h = nn.functional.gelu(h)
    return h.square().mean()


def recomputed(x: torch.Tensor) -> torch.Tensor:
    y = checkpoint(several_lines, x, use_reentrant=False)
    return y.cos()


EXPECTED = {
    several_lines: {"y = x.sin()", "z = y.exp() * 2", "return z.sum()"},
    layers: {
        "h = nn.functional.layer_norm(x, (4,))",
        "h = nn.functional.gelu(h)",
        "return h.square().mean()",
    },
    recomputed: {"y = x.sin()", "z = y.exp() * 2", "return y.cos()"},
}


@pytest.mark.parametrize("program", EXPECTED, ids=lambda f: f.__name__)
def test_nodes(program: Callable[..., Any]) -> None:
    traces: dict[str, str] = {}

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        traces.update({n.name: n.meta.get("stack_trace") or "" for n in graph.graph.nodes if n.op == "call_function"})
        return opforge.aot.make_boxed_func(graph.forward)

    backend = opforge.aot_autograd(
        fw_compiler=lambda graph, inputs: opforge.aot.make_boxed_func(graph.forward), bw_compiler=keep
    )
    torch._dynamo.reset()
    torch.compile(program, backend=backend)(torch.rand(4, 4, requires_grad=True)).backward()
    assert traces
    assert [name for name, trace in traces.items() if not trace] == []
    for line in EXPECTED[program]:
        assert any(line in trace for trace in traces.values()), line


def test_kernels() -> None:
    torch._dynamo.reset()
    opforge.reset_stats()
    compiled = torch.compile(several_lines, backend="opforge", options={"cache": False})
    compiled(torch.rand(40, requires_grad=True)).backward()
    backward = opforge.last_artifacts().backward
    assert backward is not None
    assert "y = x.sin()" in backward.cpp
