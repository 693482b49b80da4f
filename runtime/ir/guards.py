"""Positions that data brings, and values that count only where a condition holds: what keeps a program inside its buffers."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

from .nodes import FLOATS, Node, Size, const, index_node, rebuild


def bounded(value: Node, n: Size, error: str, place: str = "") -> Node:
    """An int64 position that data brings, as one of 0..n-1. One that is not is 0 and a fault: the graph raises the exception called
    `error` (a builtin) with `place` in its message. `n` must not be 0.
    """
    message = f"index out of range in {place}"
    return Node("bounded", (value, index_node(n), const(True, "bool")), "int64", (error, message))


def demanded(value: Node, holds: Node, error: str, message: str) -> Node:
    """`value` where `holds`; elsewhere nan, or 0 of an integer, and a fault, as of a position that is out of range."""
    wrong = Node("where", (holds, const(0, "int64"), const(2, "int64")), "int64")
    check = Node("bounded", (wrong, index_node(2), const(True, "bool")), "int64", (error, message))
    kept = Node("eq", (check, const(0, "int64")), "bool")
    return Node("where", (kept, value, const(math.nan if value.dtype in FLOATS else 0, value.dtype)), value.dtype)


def masked(node: Node, mask: Node, anywhere: Container[Node] = ()) -> Node:
    """The same value where `mask` holds; its loads touch no memory elsewhere, and its positions are no faults (the value there is unspecified).
    `anywhere`: loads of what is there without the mask too.
    """
    both = Node._binary

    def guard(ld: Node) -> Node:
        if ld in anywhere:
            return ld
        m = mask if not ld.args else both("&", ld.args[0], mask)
        return Node("load", (m,), ld.dtype, ld.attr)

    def spare(check: Node) -> Node:
        value, n, live = check.args
        return Node(
            "bounded",
            (value, n, mask if live.op == "const" and live.attr else both("&", live, mask)),
            "int64",
            check.attr,
        )

    return rebuild(node, guard, {}, None, spare)


def checks(roots: Iterable[Node]) -> dict[tuple[str, str], int]:
    """What the faults of some expressions say (exception type and message), numbered from 1 in the order of their evaluation."""
    found: dict[tuple[str, str], int] = {}
    seen: set[Node] = set()
    for root in roots:
        for n in root.walk(seen.__contains__):
            seen.add(n)
            if n.op == "bounded":
                found.setdefault(n.attr, len(found) + 1)
    return found


__all__ = ["bounded", "checks", "demanded", "masked"]
