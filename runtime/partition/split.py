"""Writes the forward and the backward graph for a choice of saved values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...generated.dispatch_tables import ROLES
from ..torch_compat import LazyGraphModule
from .classes import OpClass
from .cut import Choice
from .facts import Facts


@dataclass(frozen=True)
class Halves:
    """The two graphs; what is saved, by name in the forward graph, tensors before numbers; where each comes from."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: tuple[str, ...]
    tensors: int
    origins: tuple[tuple[str, int], ...]


def split(joint: fx.GraphModule, f: Facts, choice: Choice) -> Halves:
    """The two graphs for `choice`. Names are those of the joint graph."""
    tensors = [v for v in choice.saved if f.tensor[v]]
    numbers = [v for v in choice.saved if not f.tensor[v]]
    forward, copied = _forward(joint, f, tensors + numbers)
    saved = [copied[v] for v in tensors + numbers]
    backward = _backward(joint, f, tensors + numbers, copied)
    made = [LazyGraphModule(joint, g) for g in (forward, backward)]
    for module, graph in zip(made, (forward, backward), strict=True):
        graph.owning_module = module
    first = {v: ("primal", k) for k, v in enumerate(f.primals) if not f.raw[v]}
    for k, v in enumerate(f.outputs):
        if v is not None:
            first.setdefault(v, ("output", k))
    origins = tuple(
        first.get(v, ("saved", k)) if copied[v].name == f.nodes[v].name else ("saved", k)
        for k, v in enumerate(tensors + numbers)
    )
    return Halves(made[0], made[1], tuple(n.name for n in saved), len(tensors), origins)


def _forward(joint: fx.GraphModule, f: Facts, saved: list[int]) -> tuple[fx.Graph, dict[int, fx.Node]]:
    """The forward, and for each saved value the node whose result is handed over."""
    needed = [False] * len(f.nodes)
    for v in [*saved, *(o for o in f.outputs if o is not None)]:
        needed[v] = True
    for v in range(len(f.nodes) - 1, -1, -1):
        needed[v] = needed[v] or (f.kind[v] in (OpClass.FIXED, OpClass.EFFECT) and not f.backward[v])
        if needed[v]:
            for u in f.inputs[v]:
                needed[u] = True
    graph = fx.Graph(tracer_cls=joint.graph._tracer_cls)
    made: dict[fx.Node, fx.Node] = {}
    inputs = set(f.primals)
    for v, node in enumerate(f.nodes):
        if v in inputs or needed[v]:
            made[node] = _copy(graph, node, made)
    handed = {}
    for v in saved:
        node = made[f.nodes[v]]
        # A saved tensor is memory of its own: not a part of something larger, and not an input that the program overwrites later.
        if f.tensor[v] and (f.raw[f.root[v]] or (f.kind[v] is OpClass.VIEW and f.root[v] != v and not f.output[v])):
            node = _clone(graph, node)
        handed[v] = node
    outs = tuple(made[a] if isinstance(a, fx.Node) else a for a in f.output_args)
    graph.output((*outs, *handed.values()))
    return graph, handed


def _backward(joint: fx.GraphModule, f: Facts, saved: list[int], handed: dict[int, fx.Node]) -> fx.Graph:
    """The backward in its recorded order; what is computed again comes right before its first reader."""
    graph = fx.Graph(tracer_cls=joint.graph._tracer_cls)
    made: dict[fx.Node, fx.Node] = {}
    for v in saved:
        node = graph.placeholder(handed[v].name)
        node.meta = dict(handed[v].meta)
        made[f.nodes[v]] = node
    for v in f.tangents:
        made[f.nodes[v]] = _copy(graph, f.nodes[v], made)

    def emit(v: int) -> None:
        stack = [v]
        while stack:
            top = stack[-1]
            if f.nodes[top] in made:
                stack.pop()
                continue
            missing = [u for u in f.inputs[top] if f.nodes[u] not in made]
            if missing:
                stack += reversed(missing)
            else:
                made[f.nodes[top]] = _copy(graph, f.nodes[top], made)
                stack.pop()

    for v in range(len(f.nodes)):
        if f.live[v]:
            emit(v)
    for g in f.gradients:
        if g is not None:
            emit(g)
    graph.output(tuple(made[a] if isinstance(a, fx.Node) else a for a in f.gradient_args))
    return graph


def _copy(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
    copied = graph.node_copy(node, lambda n: made[n])
    copied.meta = dict(node.meta)
    return copied


def _clone(graph: fx.Graph, node: fx.Node) -> fx.Node:
    copied = graph.create_node("call_function", ROLES["clone"], (node,), name=f"{node.name}_kept")
    value = node.meta["val"]
    copied.meta = {**node.meta, "val": torch.clone(value) if isinstance(value, torch.Tensor) else value}
    return copied


def symbols_of(value: Any) -> set[Any]:
    """Free symbols of the sizes, strides and offset of a tensor, or of a symbolic number."""
    if isinstance(value, torch.Tensor):
        parts: list[Any] = [*value.shape, *value.stride(), value.storage_offset()]
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        parts = [value]
    out: set[Any] = set()
    for part in parts:
        if isinstance(part, (torch.Tensor, list, tuple)):
            out |= symbols_of(part)
        elif isinstance(part, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            out |= set(part.node.expr.free_symbols)
    return out
