"""Where an approximation is as good as the correctly rounded value: what is rounded to 16 bits next, with nothing but factors in between."""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.nodes import Node
from ..schedule.plan import Statement, Store
from .triton_tiles import roots
from .triton_values import HALF

FACTORS = ("mul", "neg", "where", "relu", "maximum", "minimum")  # they pass relative errors on as they are


def coarse(statements: Iterable[Statement]) -> frozenset[Node]:
    """The float32 values that nobody reads but to round them to a dtype of 16 bits, be it after multiplications."""
    exact: set[Node] = set()
    users: dict[Node, list[Node]] = {}
    order: dict[Node, None] = {}
    for st in statements:
        for root in roots(st):
            if not (type(st) is Store and root is st.value and root.dtype in HALF):
                exact.add(root)
            for n in root.walk(order.__contains__):  # arguments before users
                order[n] = None
                for c in n.children():
                    users.setdefault(c, []).append(n)
    found: set[Node] = set()
    for n in reversed(order):
        if n.dtype == "float32" and n not in exact and all(_forgives(u, n, found) for u in users.get(n, ())):
            found.add(n)
    return frozenset(found)


def _forgives(user: Node, n: Node, found: set[Node]) -> bool:
    if user.op == "to_dtype":
        return user.dtype in HALF
    return user.op in FACTORS and user in found


__all__ = ["coarse"]
