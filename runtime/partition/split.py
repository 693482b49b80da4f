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
from .order import backward_order, forward_order


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
    again = backward_order(f, choice)
    graph, made = _forward(joint, f, choice)
    saved = [_own(graph, f, v, made[v]) for v in tensors] + [made[v] for v in numbers]
    sizes = _missing_sizes(f, choice, again)
    for symbol in sorted(sizes, key=str):
        v, dim = sizes[symbol]
        saved.append(made[v] if dim is None else _size(graph, made[v], dim))
    graph.output((*(_result(f, a, made) for a in f.output_args), *saved))
    backward = _backward(joint, f, dict(zip(tensors + numbers, saved, strict=False)), saved, again)
    halves = []
    for g in (graph, backward):
        module = LazyGraphModule(joint, g)
        halves.append(module)
    return Halves(
        halves[0], halves[1], tuple(n.name for n in saved), len(tensors), _origins(f, tensors + numbers, saved)
    )


def _forward(joint: fx.GraphModule, f: Facts, choice: Choice) -> tuple[fx.Graph, dict[int, fx.Node]]:
    graph = fx.Graph(tracer_cls=joint.graph._tracer_cls)
    made: dict[int, fx.Node] = {}
    for v in forward_order(f, choice):
        made[v] = _copy(graph, f, v, made)
    return graph, made


def _backward(
    joint: fx.GraphModule, f: Facts, handed: dict[int, fx.Node], saved: list[fx.Node], order: list[int]
) -> fx.Graph:
    graph = fx.Graph(tracer_cls=joint.graph._tracer_cls)
    places = {}
    for node in saved:
        places[node] = graph.placeholder(node.name)
        places[node].meta = dict(node.meta)
    made = {v: places[node] for v, node in handed.items()}
    for v in (*f.tangents, *order):
        made[v] = _copy(graph, f, v, made)
    graph.output(tuple(_result(f, a, made) for a in f.gradient_args))
    return graph


def _result(f: Facts, arg: Any, made: dict[int, fx.Node]) -> Any:
    return made[f.same[f.index[arg]]] if isinstance(arg, fx.Node) else arg


def _copy(graph: fx.Graph, f: Facts, v: int, made: dict[int, fx.Node]) -> fx.Node:
    copied = graph.node_copy(f.nodes[v], lambda n: made[f.same[f.index[n]]])
    copied.meta = dict(f.nodes[v].meta)
    return copied


def _own(graph: fx.Graph, f: Facts, v: int, node: fx.Node) -> fx.Node:
    """A saved tensor is memory of its own, without gaps: not a part of something larger, and no input or output that is overwritten later."""
    alias = f.kind[v] is OpClass.VIEW and f.root[v] != v and not f.output[v]
    return _clone(graph, node) if alias or f.raw[f.root[v]] or f.lent[v] or f.gaps[v] else node


def _origins(f: Facts, saved: list[int], nodes: list[fx.Node]) -> tuple[tuple[str, int], ...]:
    """Where each saved value comes from: an input, an output, or its own position."""
    first = {v: ("primal", k) for k, v in enumerate(f.primals)}
    for k, o in enumerate(f.outputs):
        if o is not None and k not in f.lent_outputs:
            first.setdefault(o, ("output", k))
    out = []
    for k, node in enumerate(nodes):
        v = saved[k] if k < len(saved) else None
        given = v is not None and node.name == f.nodes[v].name and v in first
        out.append(first[v] if given and v is not None else ("saved", k))
    return tuple(out)


def _clone(graph: fx.Graph, node: fx.Node) -> fx.Node:
    copied = graph.create_node("call_function", ROLES["clone"], (node,), name=f"{node.name}_kept")
    value = node.meta["val"]
    copied.meta = {
        **node.meta,
        "copy_of": node.name,
        "val": torch.clone(value) if isinstance(value, torch.Tensor) else value,
    }
    return copied


def _size(graph: fx.Graph, node: fx.Node, dim: int) -> fx.Node:
    made = graph.create_node("call_function", ROLES["size"], (node, dim), name=f"{node.name}_size_{dim}")
    made.meta = {"val": node.meta["val"].shape[dim]}
    return made


def _missing_sizes(f: Facts, choice: Choice, order: list[int]) -> dict[Any, tuple[int, int | None]]:
    """Symbols that shapes of the backward mention and that none of its inputs tells: where the forward can read each, a number
    (and None) or a size of an input.
    """
    used: set[Any] = set()
    known: set[Any] = set()
    for v in (*choice.saved, *f.tangents):
        used |= _symbols(f.nodes[v].meta.get("val"))
        known |= _told(f.nodes[v].meta.get("val"))
    for v in order:
        used |= _symbols(f.nodes[v].meta.get("val"))
        if f.kind[v] is OpClass.FIXED:
            known |= _symbols(f.nodes[v].meta.get("val"))  # a size from data, made in the backward itself
    found: dict[Any, tuple[int, int | None]] = {}
    missing = used - known
    for v in range(len(f.nodes)) if missing else ():
        value = f.nodes[v].meta.get("val")
        if f.backward[v] or not (f.required[v] or v in f.primals):
            continue
        if isinstance(value, torch.SymInt) and value.node.expr in missing:
            found.setdefault(value.node.expr, (v, None))
        elif isinstance(value, torch.Tensor):
            for dim, n in enumerate(value.shape):
                if isinstance(n, torch.SymInt) and n.node.expr in missing:
                    found.setdefault(n.node.expr, (v, dim))
    return found


def _told(value: Any) -> set[Any]:
    """Symbols whose value an input tells by being one of its sizes or strides, or the number itself."""
    parts = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
    symbols = (p.node.expr for p in parts if isinstance(p, torch.SymInt))
    return {s for s in symbols if s.is_symbol}


def _symbols(value: Any) -> set[Any]:
    """Free symbols of the sizes, strides and offset of a tensor, of a symbolic number, or of a list of these."""
    if isinstance(value, torch.Tensor):
        value = (*value.shape, *value.stride(), value.storage_offset())
    out: set[Any] = set()
    for part in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(part, (torch.Tensor, list, tuple)):
            out |= _symbols(part)
        elif isinstance(part, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            out |= set(part.node.expr.free_symbols)
    return out
