"""A user's decompositions: the functional graph is run once more, and operators of the table are replaced by what their bodies call."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...errors import UnsupportedError
from ..dispatch import handlers
from ..dispatch.record.recorder import Recorder
from ..dispatch.storage.inputs import attribute
from ..dispatch.trace import TRACE_ERRORS, finish, preserved_state
from .compilers import Decompositions

_OWN_META = ("val", "tensor_meta")


def decompose(gm: fx.GraphModule, table: Decompositions) -> fx.GraphModule:
    """`gm`, a functional graph (of any output form), with the operators in `table` (overload → Python function of the same arguments, which
    may return `NotImplemented` to leave a call as it is) replaced, also those that a body itself calls. Placeholders keep their names
    and all nodes their metadata. Raises `UnsupportedError` for a body that fails, with its operator.
    """
    graph = gm.graph
    if not any(n.target in table for n in graph.nodes if n.op == "call_function"):
        return gm
    recorder = _Decomposer(_fake_mode(graph), table)
    values: dict[fx.Node, Any] = {}
    with preserved_state(), torch.no_grad(), recorder:
        for node in graph.nodes:
            if node.op == "output":
                result = fx.node.map_arg(node.args[0], lambda n: recorder.nodes(values[n]))
                break
            recorder.origin, last = node, next(iter(reversed(recorder.graph.nodes)), None)
            values[node] = _run(gm, node, values, recorder)
            if node.op == "call_function":
                _carry_metadata(node, last, recorder.graph)
    return finish(recorder, result)


class _Decomposer(Recorder):
    def __init__(self, fake_mode: Any, table: Decompositions) -> None:
        super().__init__(fake_mode, lambda i: frozenset((i,)), handlers)
        self.table = table

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        body = self.table.get(func)
        if body is not None:
            with self:
                result = body(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return super().__torch_dispatch__(func, types, args, kwargs)


def _run(gm: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any], recorder: _Decomposer) -> Any:
    if node.op == "placeholder":
        value = node.meta["val"]
        own = recorder.graph.placeholder(node.name)
        own.meta = dict(node.meta)
        if isinstance(value, torch.Tensor):
            recorder.regions.add(value, own)
            recorder.symbols.bind_sizes(value, own)
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            recorder.symbols.bind(value, own)
        return value
    if node.op == "get_attr":
        return attribute(gm, str(node.target))
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except TRACE_ERRORS as error:
        if isinstance(error, RecursionError):
            raise UnsupportedError(f"the decompositions of {node.target} call each other without end") from error
        raise UnsupportedError(
            f"{type(error).__name__} in the decomposition of {node.target}{recorder.where()}: {error}"
        ) from error


def _carry_metadata(node: fx.Node, last: fx.Node | None, graph: fx.Graph) -> None:
    made = reversed(graph.nodes)
    for new in made:
        if new is last:
            return
        new.meta |= {k: v for k, v in node.meta.items() if k not in _OWN_META and k not in new.meta}


def _fake_mode(graph: fx.Graph) -> Any:
    for node in graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode
    raise UnsupportedError("a graph without tensors has no operators to decompose")
