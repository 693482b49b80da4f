"""Which columns of a row have a logit at all, where a program says by coordinates that others are -inf: causal masks and sliding windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..ir.index import Expr, Var, expr, of
from ..ir.nodes import FLOATS, Node

_AND, _OR, _NOT = ("logical_and", "bitwise_and"), ("logical_or", "bitwise_or"), ("logical_not", "bitwise_not")
_OPPOSITE = {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt"}


@dataclass(frozen=True)
class Live:
    """The logits of a row are -inf but for columns row - before, ..., row + behind (None: no bound)."""

    before: int | None = None
    behind: int | None = None


def live_columns(logits: Node, row: Var, column: Var) -> Live:
    """What the outermost choices of a logit say: those with -inf on one side."""
    before: list[int] = []
    behind: list[int] = []
    for gap in _gaps(logits):
        # gap >= 0 is what a logit takes.
        for first, second, found in ((row, column, behind), (column, row, before)):
            rest = gap - of(first) + of(second)
            if rest.is_const:
                found.append(int(rest))
    return Live(min(before, default=None), min(behind, default=None))


def _gaps(n: Node) -> Iterator[Expr]:
    """Expressions that are not negative where a value is not -inf."""
    while True:
        if n.op == "to_dtype" and n.dtype in FLOATS and n.args[0].dtype in FLOATS:
            n = n.args[0]
        elif n.op == "where" and _is_lowest(n.args[2]):
            yield from _conditions(n.args[0], True)
            n = n.args[1]
        elif n.op == "where" and _is_lowest(n.args[1]):
            yield from _conditions(n.args[0], False)
            n = n.args[2]
        else:
            return


def _is_lowest(n: Node) -> bool:
    return n.op == "const" and n.dtype in FLOATS and n.attr == -float("inf")


def _conditions(n: Node, holds: bool) -> Iterator[Expr]:
    """Expressions that are not negative where a condition holds (or does not)."""
    if n.op in _NOT:
        yield from _conditions(n.args[0], not holds)
    elif n.op in (_AND if holds else _OR):
        for a in n.args:
            yield from _conditions(a, holds)
    elif n.op in _OPPOSITE:
        op = n.op if holds else _OPPOSITE[n.op]
        left, right = (_coordinate(x) for x in n.args)
        if left is not None and right is not None:
            gap = left - right
            yield {"ge": gap, "gt": gap - 1, "le": -gap, "lt": -gap - 1}[op]


def _coordinate(n: Node) -> Expr | None:
    if n.op == "index":
        return n.attr
    return expr(n.attr) if n.op == "const" and n.dtype == "int64" else None


__all__ = ["Live", "live_columns"]
