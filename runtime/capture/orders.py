"""The graphs of one captured backward. To the engine, autograd graphs with the same nodes and edges are one backward, though their nodes were made in
another order, and eager runs them in another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import fx

from ..observe.torch_logs import note
from ..torch_compat import disable_torch_dispatch
from ..torch_compat.compiled_autograd import running_backward
from .eager_order import eager_order
from .reorder import reorder

ROOT = 0  # the number of the node that passes on what a backward is given


class Orders:
    """Compiles a captured `graph` in the order in which eager would run its nodes.

    group  the number of the node of autograd that each node belongs to.
    sums   the nodes that add up gradients of one result.
    names  of autograd's nodes by their numbers, in the order in which they were captured.
    """

    def __init__(
        self,
        graph: fx.Graph,
        group: Mapping[fx.Node, int],
        sums: Collection[fx.Node],
        names: Mapping[int, str],
        compile: Callable[[fx.Graph], Callable[..., Any]],
    ) -> None:
        self._graph, self._group, self._sums, self._compile = graph, group, sums, compile
        self._numbers = [n for n in names if n != ROOT]
        self._names = [names[n] for n in self._numbers]
        self._made: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._first = self._running()
        if self._first is not None:
            self._reorder(graph, group, sums, self._first)

    def first(self) -> Callable[..., Any]:
        """The graph for the backward that is captured, compiled. If its order is not known it stays as it was captured."""
        compiled = self._compile(self._graph)
        if self._first is not None:
            self._made[self._first] = compiled
        return compiled

    def fitting(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The graph for the backward that runs, `compiled` is the first one."""
        order = self._running()
        if order is None:
            return compiled
        if order not in self._made:
            note("compiled_autograd_verbose", "compiled anew because eager runs these nodes in another order")
            graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
            graph.output(graph.graph_copy(self._graph, copies))
            group = {copies[node]: number for node, number in self._group.items() if node in copies}
            self._reorder(graph, group, {copies[node]: None for node in self._sums}, order)
            self._made[order] = self._compile(graph)
        return self._made[order]

    def _reorder(
        self, graph: fx.Graph, group: Mapping[fx.Node, int], sums: Collection[fx.Node], order: Sequence[int]
    ) -> None:
        reorder(graph, group, sums, [ROOT, *(self._numbers[k] for k in order)])

    def _running(self) -> tuple[int, ...] | None:
        called = running_backward()
        if called is None:
            return None
        with disable_torch_dispatch():
            order = eager_order(*called, self._names)
        return None if order is None else tuple(order)
