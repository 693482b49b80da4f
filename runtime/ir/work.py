"""What a nest has to do: how often its body is computed, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from ...generated.scalars import SCALARS
from .index import Expr, Val
from .nodes import Extern, Nest, Node, Scatter


def is_pointwise(item: Nest | Extern) -> bool:
    return (
        isinstance(item, Nest) and not item.rvars and item.reduce is None and item.scan is None and item.scatter is None
    )


def is_view(item: Nest | Extern) -> bool:
    """No arithmetic at all: a load, a constant or a coordinate. A load at a data-dependent place counts as arithmetic."""
    if not is_pointwise(item):
        return False
    assert isinstance(item, Nest)
    body = item.body
    if body.op == "load":
        return not body.args and not any(isinstance(a, Val) for e in body.attr.index for a in e.atoms())
    return body.op in ("const", "index")


def points_of(nest: Nest) -> int | Expr:
    """How many times the body is evaluated."""
    total: int | Expr = 1
    for v in nest.scatter.domain if nest.scatter is not None else (*nest.loop_vars, *nest.rvars):
        total = total * v.extent
    return total


def in_any_order(scatter: Scatter) -> bool:
    """Whether an indexed update may go through its points in any order."""
    return scatter.mode != "set" or scatter.unordered


def cost(op: str) -> float:
    """What one scalar operation costs, in additions."""
    return SCALARS[op].cost if op in SCALARS else 1


def node_cost(node: Node, costs: Callable[[str], float], enough: float = inf) -> float:
    """Arithmetic cost of one evaluation; a load counts 1. Past `enough` it is not counted on."""
    return nodes_cost((node,), costs, enough)


def nodes_cost(nodes: Iterable[Node], costs: Callable[[str], float], enough: float = inf) -> float:
    """The same of several values, of which what they have in common is computed once."""
    total = 0.0
    seen: set[Node] = set()
    left = [*nodes]
    while left:  # users before arguments, so that an expensive node is found out after a few steps
        n = left.pop()
        if n in seen:
            continue
        seen.add(n)
        if n.op == "load":
            total += 1
        elif n.op not in ("const", "index", "bounded"):  # a check must not change what is fused
            total += costs(n.op)
        if total > enough:
            break
        left += n.children()
    return total


__all__ = ["cost", "in_any_order", "is_pointwise", "is_view", "node_cost", "nodes_cost", "points_of"]
