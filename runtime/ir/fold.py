"""Decide comparisons of coordinates by the ranges of the loop variables, and drop the branches that cannot be taken."""

from __future__ import annotations

from collections.abc import Callable

from .index import Expr, Val, bounds, expr, proves_less, proves_nonnegative
from .nodes import LoadAt, Node, const, index_node, indirect

_COMPARE = {
    "lt": lambda lo, hi: (hi < 0, lo >= 0),
    "le": lambda lo, hi: (hi <= 0, lo > 0),
    "gt": lambda lo, hi: (lo > 0, hi <= 0),
    "ge": lambda lo, hi: (lo >= 0, hi < 0),
    "eq": lambda lo, hi: (lo == 0 == hi, lo > 0 or hi < 0),
    "ne": lambda lo, hi: (lo > 0 or hi < 0, lo == 0 == hi),
}
_AND = ("logical_and", "bitwise_and")
_OR = ("logical_or", "bitwise_or")
_NOT = ("logical_not", "bitwise_not")


def coordinate(node: Node) -> Expr | None:
    """The index expression that an integer node is, if it is one."""
    if node.op == "index":
        e: Expr = node.attr
        return e
    if node.op == "const" and node.dtype == "int64":
        return expr(int(node.attr))
    if node.op == "to_dtype" and node.dtype == "int64":
        return coordinate(node.args[0])
    if node.op == "bounded":
        return kept_in_range(node)
    return None


def kept_in_range(check: Node) -> Expr | None:
    """The coordinate that a `bounded` position is, if it can be seen to be in range."""
    at, n = coordinate(check.args[0]), coordinate(check.args[1])
    if at is None or n is None:
        return None
    return at if proves_nonnegative(at) and proves_less(at, n) else None


def compare(node: Node) -> bool | None:
    """The value of a comparison of two coordinates, if it is the same at every loop point."""
    if node.op not in _COMPARE:
        return None
    a, b = coordinate(node.args[0]), coordinate(node.args[1])
    if a is None or b is None:
        return None
    lo, hi = bounds(a - b)
    if lo is None or hi is None:
        return None
    yes, no = _COMPARE[node.op](lo, hi)
    return True if yes else False if no else None


def compare_sizes(node: Node) -> bool | None:
    """`compare`, also where it takes a proof over size symbols: slower, and worth it where a loop was cut at sums of sizes."""
    decided = compare(node)
    if decided is not None or node.op not in ("lt", "le", "gt", "ge"):
        return decided
    a, b = coordinate(node.args[0]), coordinate(node.args[1])
    if a is None or b is None:
        return None
    if node.op in ("gt", "le"):  # a > b is b < a, and a <= b its contrary
        a, b = b, a
    less = True if proves_less(a, b) else False if proves_nonnegative(a - b) else None
    return less if less is None or node.op in ("lt", "gt") else not less


def fold(root: Node, memo: dict[Node, Node] | None = None, decide: Callable[[Node], bool | None] = compare) -> Node:
    """The same value with every comparison that `decide` knows, and what hangs on it, removed. `memo`: what is known of other roots."""
    memo = {} if memo is None else memo

    def on_value(v: Val) -> Expr:
        return indirect(memo[v.node], v.lo, v.hi)

    for n in root.walk(memo.__contains__):
        memo[n] = _fold_one(n, memo, on_value, decide)
        # Folded once is folded: a body that grows step by step is not walked again from its start.
        memo.setdefault(memo[n], memo[n])
    return memo[root]


def _fold_one(
    n: Node, memo: dict[Node, Node], on_value: Callable[[Val], Expr], decide: Callable[[Node], bool | None]
) -> Node:
    if n.op == "load":
        index = tuple(e.subst({}, on_value) for e in n.attr.index)
        args = tuple(memo[a] for a in n.args)
        if args and args[0].op == "const":
            if not args[0].attr:
                return const(0, n.dtype)
            args = ()
        return Node("load", args, n.dtype, LoadAt(n.attr.buffer, index))
    if n.op == "index":
        return index_node(n.attr.subst({}, on_value))
    args = tuple(memo[a] for a in n.args)
    new = n if args == n.args else Node(n.op, args, n.dtype, n.attr)
    if new.op == "bounded":
        at = kept_in_range(new)
        return new if at is None else index_node(at)
    decided = decide(new)
    if decided is not None:
        return const(decided, "bool")
    if new.op == "where" and args[0].op == "const":
        return args[1] if args[0].attr else args[2]
    if new.dtype == "bool" and new.op in (*_AND, *_OR) and len(args) == 2:
        for known, other in (args, args[::-1]):
            if known.op == "const":
                return other if bool(known.attr) == (new.op in _AND) else known
    if new.dtype == "bool" and new.op in _NOT and args[0].op == "const":
        return const(not args[0].attr, "bool")
    return new


__all__ = ["compare", "compare_sizes", "coordinate", "fold", "kept_in_range"]
