"""In which order eager's engine would run the nodes of a captured backward.

While it captures, the engine takes nodes from a stack; when it runs, from a queue by sequence number. Hooks, and what a leaf's `.grad` is meanwhile,
show the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..dispatch.autograd.ready import ReadyQueue


class Walk:
    """The nodes of a backward from the tensors `outputs`. `inputs`: tensors or edges whose gradients are asked for; none: all leaves get theirs."""

    def __init__(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        self.roots = [_edge(t).node for t in outputs]
        self.ends = {_edge(t).node for t in inputs}
        self.after: dict[Any, list[Any]] = {}
        order = self._from_roots()
        self.needed: set[Any] = set()
        for node in reversed(order):
            if not inputs or node in self.ends or any(n in self.needed for n in self.after[node]):
                self.needed.add(node)

    def _from_roots(self) -> list[Any]:
        """All nodes, each behind what leads to it."""
        found: list[Any] = []
        stack = [(node, False) for node in self.roots]
        while stack:
            node, done = stack.pop()
            if done:
                found.append(node)
            elif node not in self.after:
                self.after[node] = [n for n, _ in node.next_functions if n is not None]
                stack.append((node, True))
                stack += [(n, False) for n in self.after[node]]
        return found[::-1]

    def waits(self) -> dict[Any, int]:
        """How many edges lead to each node."""
        counts = dict.fromkeys(self.needed, 0)
        for node in (*self.roots, *(n for before in self.needed for n in self.after[before])):
            if node in counts:
                counts[node] += 1
        return counts

    def captured(self) -> list[Any]:
        """The order in which the engine captures."""
        return self._run(_Stack())

    def eager(self) -> list[Any]:
        """The order in which it runs them on one thread."""
        return self._run(ReadyQueue())

    def _run(self, ready: Any) -> list[Any]:
        waits, found = self.waits(), []

        def arrive(nodes: Sequence[Any]) -> None:
            for node in nodes:
                if node in self.needed:
                    waits[node] -= 1
                    if not waits[node]:
                        ready.push(node)

        arrive(self.roots)
        while len(ready):
            node = ready.pop()
            found.append(node)
            arrive(self.after[node])
        return found


class _Stack(list[Any]):
    push = list.append


def _edge(t: Any) -> Any:
    return t if isinstance(t, GradientEdge) else get_gradient_edge(t)


def eager_order(outputs: Sequence[Any], inputs: Sequence[Any], names: Sequence[str]) -> list[int] | None:
    """The captured nodes in eager's order, as positions in `names`, which has their names in the order of capture, without the root. None if a walk
    over the graph does not find these names: then the order is not known.
    """
    walk = Walk(outputs, inputs)
    captured = walk.captured()
    if [node.name() for node in captured] != list(names):
        return None
    position = {node: k for k, node in enumerate(captured)}
    return [position[node] for node in walk.eager()]
