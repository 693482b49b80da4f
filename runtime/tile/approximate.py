"""Where an approximation is as good as the correctly rounded value: what is rounded to 16 bits next, with nothing but factors in between."""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.nodes import Node
from ..kernels.operands import HALF
from ..kernels.plan import Reduce, Statement, Store
from .scratch import roots

BESIDE_ONE = (
    "erf",
    "tanh",
)  # their approximations have small absolute errors only: enough for what is added to a number of at least one
FACTORS = ("mul", "div", "neg", "where", "relu", "maximum", "minimum")  # they pass relative errors on as they are


def approximate(statements: Iterable[Statement]) -> frozenset[Node]:
    """The float32 values that nobody reads but to round them to a dtype of 16 bits, be it after multiplications."""
    exact: set[Node] = set()
    sums: dict[Node, str] = {}  # exponentials, and what keeps their sum
    read: dict[str, list[Node]] = {}
    users: dict[Node, list[Node]] = {}
    order: dict[Node, None] = {}
    for st in statements:
        for root in roots(st):
            if isinstance(st, Reduce) and st.kind == "sum" and root.op == "exp" and root not in sums:
                sums[root] = st.name  # all of one sign: the sum is as near as they are
            elif not (type(st) is Store and root is st.value and root.dtype in HALF):
                exact.add(root)
            for n in root.walk(order.__contains__):  # arguments before users
                order[n] = None
                if n.op == "load":
                    read.setdefault(n.attr.buffer, []).append(n)
                for c in n.children():
                    users.setdefault(c, []).append(n)
    found: set[Node] = set()
    for n in reversed(order):
        forgives = _exceeds if n.op in BESIDE_ONE else _forgives
        if n.dtype != "float32" or n in exact or not all(forgives(u, found) for u in users.get(n, ())):
            continue
        if n not in sums or all(ld in found for ld in read.get(sums[n], ())):
            found.add(n)
    return frozenset(found)


def _forgives(user: Node, found: set[Node]) -> bool:
    if user.op == "to_dtype":
        return user.dtype in HALF
    return user.op in FACTORS and user in found


def _exceeds(user: Node, found: set[Node]) -> bool:
    """Whether the user adds a number beside which the argument's last digits are lost, and forgives errors of the sum."""
    return user.op == "add" and user in found and any(a.op == "const" and abs(a.attr) >= 1 for a in user.args)


__all__ = ["approximate"]
