"""Which graphs can be recorded, and what their arguments are to a recording."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from ..torch_compat import HigherOrderOperator, pytree
from .recording import Slot


def why_not(graph: fx.GraphModule, device: str) -> str:
    """The reason for which the graph's work on a kind of device cannot be recorded; "" where it can."""
    told: set[object] = set()
    for node in graph.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.device.type != device:
                return f"{node.name} is on the device {value.device}"
        if node.op == "placeholder":
            told |= _symbols(node)
        elif node.op == "call_function" and not _symbols(node) <= told:
            return f"{node.name} has sizes that its data brings"
        if isinstance(node.target, HigherOrderOperator):
            return f"{node.name} calls {node.target}"
    return ""


def _symbols(node: fx.Node) -> set[object]:
    """The symbols in the sizes of what a node gives, or in the number that it is."""
    found: set[object] = set()
    for value in pytree.tree_leaves(node.meta.get("val")):
        for n in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                found |= n.node.expr.free_symbols
    return found


def slots_of(graph: fx.GraphModule, fixed: Collection[int]) -> list[Slot]:
    """One for each placeholder; `fixed`: positions of those that are never copied."""
    slots = []
    for k, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            slots.append(Slot(unread=not node.users, dynamic=_is_dynamic(value), fixed=k in fixed))
        else:
            slots.append(Slot(number=True))
    return slots


def _is_dynamic(t: torch.Tensor) -> bool:
    return any(type(n) is not int for n in (*t.shape, *t.stride(), t.storage_offset()))
