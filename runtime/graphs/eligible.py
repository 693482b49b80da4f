"""Which graphs can be recorded, what their arguments and results are to a recording, and what is said where there is none."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from ...errors import UnsupportedError
from ..build.scratch import warn_once
from ..dispatch.record.source import source_of
from ..dispatch.storage.regions import is_strided
from ..observe import counters
from ..torch_compat import HigherOrderOperator, pytree
from .recording import Slot


def unrecorded(reason: str, strict: bool, error: Exception | None = None) -> None:
    """A graph, or a call of one, runs without the CUDA graph that was asked for: that is counted, and warned of once for each reason. With `strict`
    it raises `UnsupportedError`.
    """
    counters.count_unrecorded(reason)
    if strict:
        raise UnsupportedError(f"a compiled graph is not recorded as a CUDA graph: {reason}") from error
    told = "runs without the CUDA graph that was asked for"
    warn_once("unrecorded", reason, f"opforge: a compiled graph {told}: {reason} (strict=True raises instead)")


def why_not(graph: fx.GraphModule, device: str) -> str:
    """The reason for which the graph's work on a kind of device cannot be recorded, with the user's line; "" where it can."""
    told: set[object] = set()
    for node in graph.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.device.type != device:
                return f"{node.name} is on the device {value.device}{_at(node)}"
            if not is_strided(value):
                return f"{node.name} is a sparse tensor{_at(node)}"
        if node.op == "placeholder":
            told |= _symbols(node)
        elif node.op == "call_function" and not _symbols(node) <= told:
            return f"{node.name} has sizes that its data brings{_at(node)}"
        if isinstance(node.target, HigherOrderOperator):
            return f"{node.name} calls {node.target}{_at(node)}"
    return ""


def _at(node: fx.Node) -> str:
    """The user's line that made a node, or, of an input, the first that reads it."""
    lines = filter(None, map(source_of, (node, *node.users)))
    return f" ({line})" if (line := next(lines, "")) else ""


def lines_of(graph: fx.GraphModule) -> list[str]:
    """For each result the user's line that made it; "" where none is known."""
    (output,) = [n for n in graph.graph.nodes if n.op == "output"]
    return [source_of(r) if isinstance(r, fx.Node) else "" for r in pytree.tree_leaves(output.args[0])]


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
