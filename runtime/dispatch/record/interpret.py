"""Runs an FX graph node by node on fake tensors, telling the recorder which node it is at."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ....errors import UnsupportedError
from ....generated.decompositions import (
    CHOICES,
    CONTROL,
    CUSTOM_GRADIENTS,
    FOLLOWED,
    FUNCTIONS,
    INLINED,
    REFUSED_FUNCTIONS,
    UNFOLDED,
)
from ...torch_compat import (
    HigherOrderOperator,
    TorchFunctionMode,
    below_autograd,
    by_operators,
    pytree,
    switch_grad_mode,
    tag_activation_checkpoint,
    with_effects,
)
from ..operators.effects import run_with_token
from ..storage.inputs import attribute
from ..symbols.kernels import register
from ..symbols.sizes import OF_NUMBERS
from .checkpoint import region
from .recorder import Recorder

register()


def run_graph(gm: fx.GraphModule, args: Sequence[Any], attributes: Mapping[str, Any], recorder: Recorder) -> Any:
    """What the graph returns for `args`; `attributes` replaces its parameters, buffers and constants by dotted name."""
    env: dict[fx.Node, Any] = {}
    remaining = iter(args)

    def load(a: Any) -> Any:
        return fx.node.map_arg(a, env.__getitem__)

    for node in gm.graph.nodes:
        recorder.origin = node
        called = node.target.name() if isinstance(node.target, HigherOrderOperator) else ""
        match node.op:
            case "placeholder":
                env[node] = next(remaining)
            case "get_attr":
                path = str(node.target)
                env[node] = attributes[path] if path in attributes else attribute(gm, path)
            case "call_function" if node.target is tag_activation_checkpoint:
                body, *values = load(node.args)
                with region(recorder, body):
                    env[node] = run_graph(body, values, {}, recorder)
            case "call_function" if node.target is with_effects:
                env[node] = run_with_token(*load(node.args), **load(node.kwargs))
            case "call_function" if called in INLINED:
                function, given = INLINED[called]
                body, values = load(node.args)[function], load(node.args)[given:]
                env[node] = run_graph(body, values, {}, recorder) if isinstance(body, fx.GraphModule) else body(*values)
            case "call_function" if called in UNFOLDED:
                env[node] = _unfolded(node.target, load(node.args), load(node.kwargs))
            case "call_function" if called in CONTROL:
                env[node] = recorder.handlers.followed_control(
                    recorder, node.target, load(node.args), load(node.kwargs)
                )
            case "call_function" if called in CHOICES:
                env[node] = recorder.handlers.choice(recorder, node.target, load(node.args), load(node.kwargs))
            case "call_function" if called in CUSTOM_GRADIENTS and recorder.twice:
                env[node] = _twice(node.target, list(load(node.args)), load(node.kwargs))
            case "call_function":
                env[node] = call(recorder, node.target, load(node.args), load(node.kwargs))
            case "call_method":
                this, *rest = load(node.args)
                env[node] = getattr(this, str(node.target))(*rest, **load(node.kwargs))
            case "call_module":
                path = str(node.target)
                own = {
                    name.removeprefix(path + "."): t for name, t in attributes.items() if name.startswith(path + ".")
                }
                module = gm.get_submodule(path)
                env[node] = torch.func.functional_call(module, own, tuple(load(node.args)), load(node.kwargs))
            case "output":
                recorder.origin = None
                return load(node.args[0])
    raise AssertionError("a graph without an output")


def _twice(op: HigherOrderOperator, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """An autograd function of the program whose gradients are to be differentiated."""
    where = CUSTOM_GRADIENTS[op.name()]
    args[where] = _differentiable(args[where])
    return op(*args, **kwargs)


def _differentiable(backward: fx.GraphModule) -> fx.GraphModule:
    """The backward of an autograd function of the program, without the calls at its ends by which Dynamo keeps its gradients from being
    differentiated. Raises `UnsupportedError` where it switches grad mode inside as well.
    """
    switches = [n for n in backward.graph.nodes if n.target is switch_grad_mode]
    calls = [n for n in backward.graph.nodes if n.op not in ("placeholder", "output")]
    ends = (
        [n for n, mode in zip((calls[0], calls[-1]), (False, True), strict=True) if n.args == (mode,)] if calls else []
    )
    if switches != ends:
        raise UnsupportedError("the backward of an autograd function of the program switches grad mode")
    graph = fx.Graph()
    graph.output(graph.graph_copy(backward.graph, {}))
    for node in list(graph.nodes):
        if node.target is switch_grad_mode:
            graph.erase_node(node)
    return fx.GraphModule(backward, graph)


def _unfolded(op: Any, args: Any, kwargs: Any) -> Any:
    """A higher-order operator as the operators that it calls. Raises `UnsupportedError` where autograd would raise."""
    tensors = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
    if not UNFOLDED[op.name()] and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise UnsupportedError(f"the gradient of {op}, which autograd refuses")
    return by_operators(op)(*args, **kwargs)


class Called(TorchFunctionMode):
    """What `run_graph` does with functions that the spec replaces or refuses, for a program that is no graph."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(self.recorder, func, args, kwargs or {})


def call(recorder: Recorder, function: Any, args: Any, kwargs: Any) -> Any:
    """A call of a program, by what the spec says of it. What replaces it runs below autograd, where operators are not taken apart, so that the
    recorder sees them whole; or autograd follows it, if the spec says so.
    """
    if _is_of_floats(function, args):  # torch's own expression of a boolean as a float fails once its value is known
        args = tuple(torch.sym_ite(a, 1.0, 0.0) if isinstance(a, torch.SymBool) else a for a in args)
    if function in REFUSED_FUNCTIONS:
        refuses, reason = REFUSED_FUNCTIONS[function]
        if refuses(*args, **kwargs):
            raise UnsupportedError(f"{function.__name__}: {reason}")
    if function in FUNCTIONS:
        with contextlib.nullcontext() if function in FOLLOWED else below_autograd():
            result = FUNCTIONS[function](recorder, *args, **kwargs)
        if result is not NotImplemented:
            return result
    return function(*args, **kwargs) if kwargs.get("out") is None else _with_out(function, args, kwargs)


def _is_of_floats(function: Any, args: Any) -> bool:
    """Whether booleans among the arguments count as floats: in arithmetic and comparisons of Python's numbers, one of which is a float."""
    if function is torch.sym_float:
        return True
    return function in OF_NUMBERS and any(isinstance(a, (float, torch.SymFloat)) for a in args)


def _with_out(function: Any, args: Any, kwargs: Any) -> Any:
    """Some functions of torch compute their result anew, and leave `out=` alone, where an argument is no plain tensor."""
    outs = [t for t in pytree.tree_leaves(kwargs["out"]) if isinstance(t, torch.Tensor) and not t.is_inference()]
    before = [t._version for t in outs]
    result = function(*args, **kwargs)
    if any(t._version == version and t.numel() for t, version in zip(outs, before, strict=True)):
        raise UnsupportedError(f"{function.__name__} does not write its out= when it is traced")
    return result
