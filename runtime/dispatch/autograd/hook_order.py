"""In which order eager's engine reaches the leaves of a program: the order of their hooks, which bucketed reducers and optimizers see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .ready import ReadyQueue


def is_hooked(*tensors: torch.Tensor) -> bool:
    """Whether one of these tensors has a hook that autograd runs when their gradient arrives."""
    return any(t._backward_hooks or t._post_accumulate_grad_hooks for t in tensors)


def leaves_in_order(results: Sequence[Any], edges: Sequence[Any]) -> tuple[int, ...]:
    """Positions of those gradient `edges` that end in leaves, in the order in which autograd's engine, started from the gradient edges
    `results`, would accumulate their gradients on one thread. Edges that it does not reach are left out.

    The engine (torch/csrc/autograd/engine.cpp) takes the ready node with the highest sequence number; a node is ready when everything that
    uses its result has run. Leaves have the highest number of all, so each gets its gradient right after its first use in the forward.
    """
    leaves = {e.node: k for k, e in enumerate(edges) if hasattr(e.node, "variable")}
    ends = {e.node for e in edges}
    waits: dict[Any, int] = {}
    stack = [e.node for e in results]
    seen = set(stack)
    for node in stack:
        waits[node] = waits.get(node, 0) + 1
    while stack:
        for after in _after(stack.pop(), ends):
            waits[after] = waits.get(after, 0) + 1
            if after not in seen:
                seen.add(after)
                stack.append(after)
    ready = ReadyQueue()
    found: list[int] = []

    def arrive(nodes: Sequence[Any]) -> None:
        for node in nodes:
            waits[node] -= 1
            if not waits[node]:
                ready.push(node)

    arrive([e.node for e in results])
    while ready:
        node = ready.pop()
        if node in leaves:
            found.append(leaves[node])
        arrive(_after(node, ends))
    return tuple(found)


def _after(node: Any, ends: set[Any]) -> list[Any]:
    return [] if node in ends else [after for after, _ in node.next_functions if after is not None]
