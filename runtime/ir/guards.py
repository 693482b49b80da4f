"""Positions that data brings, and values that count only where a condition holds: what keeps a program inside its buffers."""

from __future__ import annotations

from collections.abc import Container, Iterable

from .nodes import Node, Size, const, index_node, rebuild


def bounded(value: Node, n: Size, error: str, place: str = "") -> Node:
    """An int64 position that data brings, as one of 0..n-1. One that is not is 0 and a fault: the graph raises the exception called
    `error` (a builtin) with `place` in its message. `n` must not be 0.
    """
    return Node("bounded", (value, index_node(n), const(True, "bool")), "int64", (error, place))


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
    """What the faults of some expressions say (exception type and place), numbered from 1 in the order of their evaluation."""
    found: dict[tuple[str, str], int] = {}
    seen: set[Node] = set()
    for root in roots:
        for n in root.walk(seen.__contains__):
            seen.add(n)
            if n.op == "bounded":
                found.setdefault(n.attr, len(found) + 1)
    return found


__all__ = ["bounded", "checks", "masked"]
