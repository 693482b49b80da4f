"""Which nodes each half computes, and in which order."""

from __future__ import annotations

from .classes import OpClass
from .cut import Choice
from .facts import Facts


def forward_order(f: Facts, choice: Choice) -> list[int]:
    """The nodes of the forward: inputs, what its outputs and the saved values need, and what draws random numbers or has an effect."""
    needed = [False] * len(f.nodes)
    for v in (*choice.saved, *f.primals, *(o for o in f.outputs if o is not None)):
        needed[v] = True
    for v in range(len(f.nodes) - 1, -1, -1):
        needed[v] = needed[v] or (f.kind[v] in (OpClass.FIXED, OpClass.EFFECT) and not f.backward[v])
        if needed[v]:
            for u in f.inputs[v]:
                needed[u] = True
    return [v for v in range(len(f.nodes)) if needed[v]]


def backward_order(f: Facts, choice: Choice) -> list[int]:
    """The nodes that the backward computes: those of the joint graph in its order, and what is computed again right before its first
    reader, so that it lies in memory for as short as can be.
    """
    done = [False] * len(f.nodes)
    for v in (*choice.saved, *f.tangents):
        done[v] = True
    order = []
    for goal in (*(v for v in range(len(f.nodes)) if f.live[v]), *(g for g in f.gradients if g is not None)):
        stack = [goal]
        while stack:
            top = stack[-1]
            missing = [] if done[top] else [u for u in f.inputs[top] if not done[u]]
            if missing:
                stack += reversed(missing)
                continue
            if not done[top]:
                done[top] = True
                order.append(top)
            stack.pop()
    return order
