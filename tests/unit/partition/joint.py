"""Joint graphs for the tests of the partitioner, made by torch's own tracer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx


def joint_graph(
    function: Callable[..., Any], args: Sequence[torch.Tensor], *, dynamic: bool = False, decompositions: Any = None
) -> tuple[fx.GraphModule, int, int]:
    """The joint graph of `function` as `(outputs, gradients)`, with the numbers of its primals and outputs."""
    outs = function(*args)
    outs = outs if isinstance(outs, tuple) else (outs,)
    tangents = [torch.randn_like(o) for o in outs if o.requires_grad]
    marker: list[int] = []
    count = len(args)

    def joint(*flat: torch.Tensor) -> Any:
        primals = flat[:count]
        results = function(*primals)
        results = results if isinstance(results, tuple) else (results,)
        wanted = [p for p in primals if p.requires_grad]
        graph = _graph_of(flat[0], results)
        marker.append(graph)
        grads = torch.autograd.grad([r for r in results if r.requires_grad], wanted, flat[count:], allow_unused=True)
        left = iter(grads)
        return tuple(results), tuple(next(left) if p.requires_grad else None for p in primals)

    traced = make_fx(joint, tracing_mode="symbolic" if dynamic else "fake", decomposition_table=decompositions or {})(
        *args, *tangents
    )
    for k, node in enumerate(traced.graph.nodes):
        if node.op == "call_function" and k >= marker[-1]:
            node.meta["backward"] = True
        if node.op == "placeholder" and k >= count:
            node.meta["tangent"] = True
    traced.graph.lint()
    return traced, count, len(outs)


def _graph_of(value: Any, results: Any) -> int:
    """How many nodes are recorded so far: those after them belong to the backward."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None
    return len(mode.tracer.graph.nodes)
