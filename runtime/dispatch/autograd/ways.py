"""From which results of a program autograd finds a way to what else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


class Ways:
    """From which of some results autograd finds a way to its nodes and their gradient edges. `nodes`: for each node the results, as bits."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        roots = [get_gradient_edge(t) for t in results]
        order: list[Any] = []
        seen: set[Any] = set()
        stack = [(e.node, False) for e in roots]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(after, False) for after, _ in node.next_functions if after is not None]
        self.nodes: dict[Any, int] = dict.fromkeys(order, 0)
        self._ways: dict[tuple[Any, int], int] = {}
        for k, e in enumerate(roots):
            self.nodes[e.node] |= 1 << k
            self._ways[e.node, e.output_nr] = self._ways.get((e.node, e.output_nr), 0) | 1 << k
        for node in reversed(order):
            for after, n in node.next_functions:
                if after is not None:
                    self.nodes[after] |= self.nodes[node]
                    self._ways[after, n] = self._ways.get((after, n), 0) | self.nodes[node]

    def to(self, edges: Sequence[Any]) -> tuple[int, ...]:
        """For each gradient edge the results from which there is a way to it, as bits."""
        return tuple(self._ways.get((e.node, e.output_nr), 0) for e in edges)
