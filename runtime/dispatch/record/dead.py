"""The end of a recorded graph, without calls whose result nobody reads. Does the eager kernel take such a call? A compiled graph leaves it out,
and with it the error that eager raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ....errors import UnsupportedError
from ...torch_compat import LazyGraphModule, OpOverload, pytree, size_hint
from .writer import GraphWriter

_LIMIT = 1 << 14  # elements of an argument: beyond, a trial would cost more than it finds


def finish(recorder: GraphWriter, outputs: Any) -> fx.GraphModule:
    """The graph module, which returns `outputs`, nodes in tuples: without dead code (nodes with effects, and those that take from the random
    stream, stay). Raises `UnsupportedError` where eager would refuse what is left out.
    """
    graph = recorder.graph
    graph.output(outputs)
    for node in reversed(graph.nodes):
        if not node.users and node.op in ("call_function", "get_attr") and node not in recorder.kept:
            check_dead(node)
            graph.erase_node(node)
    return LazyGraphModule(recorder.constants, graph, class_name="Functional")


def check_dead(node: fx.Node) -> None:
    """Raises `UnsupportedError` where the eager kernel of the CPU refuses the call of `node`, tried with zeros and with ones of the dtypes and
    sizes of its arguments (symbolic ones as in the example inputs): fakes accept dtypes that no kernel is written for, and sizes that kernels
    refuse.
    """
    if not isinstance(node.target, OpOverload):
        return
    fakes = [a.meta.get("val") for a in node.all_input_nodes]
    tensors = [t for t in fakes if isinstance(t, torch.Tensor)]
    numbers = [n for n in fakes if isinstance(n, torch.SymInt)]
    results = [t for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    if not tensors or len(tensors) + len(numbers) != len(fakes):
        return
    if not all(map(_fits, (*tensors, *results))) or any(size_hint(n, -1) < 0 for n in numbers):
        return
    error = _error(node, torch.zeros)
    if error is not None and _error(node, torch.ones) is not None:
        dtypes = ", ".join(str(t.dtype) for t in tensors)
        reason = (str(error).splitlines() or [""])[0]
        raise UnsupportedError(
            f"{node.target} of {dtypes}, whose result nobody reads, is refused by its eager kernel ({reason})"
        )


def _fits(t: torch.Tensor) -> bool:
    sizes = _sizes(t)
    plain = t.layout is torch.strided and t.device.type == "cpu" and min(sizes, default=0) >= 0
    return plain and math.prod(sizes) <= _LIMIT


def _sizes(t: torch.Tensor) -> list[int]:
    return [size_hint(n, -1) for n in t.shape]


def _error(node: fx.Node, make: Callable[..., torch.Tensor]) -> Exception | None:
    def real(a: fx.Node) -> torch.Tensor | int:
        t = a.meta["val"]
        return make(_sizes(t), dtype=t.dtype) if isinstance(t, torch.Tensor) else size_hint(t, -1)

    try:
        with torch.no_grad():
            node.target(*fx.map_arg(node.args, real), **fx.map_arg(node.kwargs, real))  # type: ignore[operator]
    except Exception as error:  # noqa: BLE001 - whatever it is, eager would raise it
        return error
    return None
