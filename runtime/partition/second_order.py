"""What gradients of gradients compute from what a forward has saved: parts of the graph of the second order, cut where a saved value stands."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ...errors import UnsupportedError
from ..dispatch.operators.effects import gives_the_same, has_effect
from ..torch_compat import LazyGraphModule


class Numbering:
    """Numbers for the values of several graphs, so that values computed alike from the same arguments have the same number."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def of(self, gm: fx.GraphModule, sizes: Mapping[Any, Any] = MappingProxyType({})) -> dict[fx.Node, Hashable]:
        """The numbers of a graph's values, with `sizes` for its symbols (a size that is known is itself). Placeholders are told apart by their
        position; calls that may differ, of random numbers for one, by how many of their operator come before.
        """
        found: dict[fx.Node, Hashable] = {}
        calls: dict[Any, int] = {}
        for k, node in enumerate(gm.graph.nodes):
            if node.op == "output":
                break
            target: Hashable = node.target
            which = 0
            if node.op == "placeholder":
                target, which = node.op, k
            elif node.op == "get_attr":
                target = id(getattr(gm, str(node.target)))
            elif not gives_the_same(node.target):
                which = calls[target] = calls.get(target, 0) + 1
            form = (node.op, target, which, _form(node.args, found), _form(sorted(node.kwargs.items()), found))
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and not (n := value.node.expr.xreplace(sizes)).free_symbols:
                found[node] = _form(int(n), found)
            else:
                found[node] = self._numbers.setdefault(form, len(self._numbers))
        return found


def _form(value: Any, numbers: dict[fx.Node, Hashable]) -> Hashable:
    if isinstance(value, fx.Node):
        return numbers[value]
    if isinstance(value, (list, tuple)):
        return tuple(_form(v, numbers) for v in value)
    if isinstance(value, (int, float, bool, str, type(None), torch.dtype, torch.device, complex)):
        return type(value), repr(value)
    return repr(value)


@dataclass(frozen=True)
class Part:
    """A part of a graph: `graph` takes the values of the nodes `taken`, in that order, and computes those of `made`."""

    graph: fx.GraphModule
    taken: tuple[fx.Node, ...]
    made: frozenset[fx.Node]


def part_between(whole: fx.GraphModule, given: Collection[fx.Node], results: Sequence[fx.Node | None]) -> Part:
    """What computes `results` from the values of the nodes `given`, and the checks of a backward on the way. Raises `UnsupportedError` where it would
    run again what may not run twice.
    """
    stop = set(given)
    needed = _needed(results, stop)
    inside = needed - stop
    checks = {n for n in whole.graph.nodes if _is_check(n) and not inside.isdisjoint(n.all_input_nodes)}
    needed |= {n for n in checks if needed.issuperset(n.all_input_nodes)}
    graph = fx.Graph()
    taken = tuple(n for n in whole.graph.nodes if n in needed and n in stop)
    made = {n: graph.placeholder(n.name) for n in taken}
    for n in whole.graph.nodes:
        if n not in needed or n in stop:
            continue
        if n.op == "placeholder" or not (n in checks or gives_the_same(n.target)):
            raise UnsupportedError(f"{n.name} ({n.target}), which it needs, was not saved and cannot be computed again")
        made[n] = graph.node_copy(n, made.__getitem__)
    graph.output(tuple(None if n is None else made[n] for n in results))
    return Part(LazyGraphModule(whole, graph), taken, frozenset(needed - stop))


def _is_check(node: fx.Node) -> bool:
    """Whether a call of a backward only looks at values: whether a solver has found what it was asked for."""
    return node.op == "call_function" and has_effect(node.target) and "backward" in node.meta


def _needed(results: Iterable[fx.Node | None], stop: Collection[fx.Node]) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    work = [n for n in results if n is not None]
    while work:
        node = work.pop()
        if node not in needed:
            needed.add(node)
            work += [] if node in stop else node.all_input_nodes
    return needed
