"""Which columns of a row have a logit at all, where a program says by coordinates that others are -inf: causal masks and sliding windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..ir.index import Expr, Var, expr, of
from ..ir.nodes import FLOATS, Node
from .triton_logits import is_lowest

_AND, _OR, _NOT = ("logical_and", "bitwise_and"), ("logical_or", "bitwise_or"), ("logical_not", "bitwise_not")
_OPPOSITE = {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt"}


@dataclass(frozen=True)
class Live:
    """The columns row - before, ..., row + behind of a row (None: no bound)."""

    before: int | None = None
    behind: int | None = None


def live_columns(logits: Node, row: Var, column: Var) -> Live:
    """What the outermost choices of a logit say, those with -inf on one side: the logits of all other columns are -inf."""
    found: list[Live] = []
    while (choice := _choice(logits)) is not None:
        condition, holds, logits = choice
        found += [live for c in _conditions(condition, holds) if (live := _bound(c, row, column)) is not None]
    return _all(found)


def free_columns(logits: Node, row: Var, column: Var) -> tuple[Node, Live]:
    """A logit without those of these choices that ask nothing but coordinates, and the columns for which they take the logit."""
    found: list[Live] = []
    while (choice := _choice(logits)) is not None:
        condition, holds, inner = choice
        bounds = [_bound(c, row, column) for c in _conditions(condition, holds)]
        if None in bounds or logits.op != "where":
            break
        found += [live for live in bounds if live is not None]
        logits = inner
    return logits, _all(found)


def _all(found: list[Live]) -> Live:
    return Live(
        min((n for f in found if (n := f.before) is not None), default=None),
        min((n for f in found if (n := f.behind) is not None), default=None),
    )


def _choice(n: Node) -> tuple[Node, bool, Node] | None:
    """Of a choice between -inf and a logit: the condition, what it is for the logit, and the logit."""
    while n.op == "to_dtype" and n.dtype in FLOATS and n.args[0].dtype in FLOATS:
        (n,) = n.args
    if n.op == "where" and is_lowest(n.args[2]):
        return n.args[0], True, n.args[1]
    if n.op == "where" and is_lowest(n.args[1]):
        return n.args[0], False, n.args[2]
    return None


def _bound(gap: Expr | None, row: Var, column: Var) -> Live | None:
    """The columns for which an expression is not negative, if it is a difference of row and column."""
    if gap is None:
        return None
    if (rest := gap - of(row) + of(column)).is_const:
        return Live(behind=int(rest))
    if (rest := gap - of(column) + of(row)).is_const:
        return Live(before=int(rest))
    return None


def _conditions(n: Node, holds: bool) -> Iterator[Expr | None]:
    """Expressions that are not negative where a condition holds (or does not), and None for each part of it that is none; only where none of
    them is negative it holds, if there is no None.
    """
    if n.op in _NOT:
        yield from _conditions(n.args[0], not holds)
    elif n.op in (_AND if holds else _OR):
        for a in n.args:
            yield from _conditions(a, holds)
    elif n.op in _OPPOSITE:
        op = n.op if holds else _OPPOSITE[n.op]
        left, right = (_coordinate(x) for x in n.args)
        if left is None or right is None:
            yield None
        else:
            gap = left - right
            yield {"ge": gap, "gt": gap - 1, "le": -gap, "lt": -gap - 1}[op]
    else:
        yield None


def _coordinate(n: Node) -> Expr | None:
    if n.op == "index":
        return n.attr
    return expr(n.attr) if n.op == "const" and n.dtype == "int64" else None


__all__ = ["Live", "free_columns", "live_columns"]
