"""Mask bounds of attention: which columns of a row have a logit at all, where others are -inf. They follow from coordinates (causal masks and sliding
windows), or from data of columns, or of rows and of columns (padding, documents).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..ir.index import Expr, Var, expr, of
from ..ir.nodes import FLOATS, Node
from ..kernels.operands import has_values
from .logits import is_lowest

_AND, _OR, _NOT = ("logical_and", "bitwise_and"), ("logical_or", "bitwise_or"), ("logical_not", "bitwise_not")
_OPPOSITE = {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt"}
_TURNED = {"ge": "le", "le": "ge", "gt": "lt", "lt": "gt", "eq": "eq"}
_WHOLE = ("int8", "int16", "int32", "int64", "uint8")


@dataclass(frozen=True)
class MaskBounds:
    """The columns row - before, ..., row + behind of a row (None: no bound)."""

    before: int | None = None
    behind: int | None = None


@dataclass(frozen=True)
class DataMaskBounds:
    """A column has a logit for a row only if `column` is true of it (no `op`), or if `op` holds between `row` of the row and `column` of the column,
    both integers.
    """

    column: Node
    op: str = ""
    row: Node | None = None


def data_mask_bounds(logits: Node, rows: Collection[Var], columns: Collection[Var], score: str) -> list[DataMaskBounds]:
    """Conditions on data in the outermost choices of a logit, one number for each column. `score`: the register that is no data."""
    found: list[DataMaskBounds] = []
    while (choice := _choice(logits)) is not None:
        condition, holds, logits = choice
        for part, true in _parts(condition, holds):
            data = part.loads()
            if not data or any(
                ld.attr.buffer == score or ld.args or any(map(has_values, ld.attr.index)) for ld in data
            ):
                continue
            if (bound := _data_bound(part, true, frozenset(rows), frozenset(columns))) is not None:
                found.append(bound)
    return found


def _data_bound(n: Node, holds: bool, rows: frozenset[Var], columns: frozenset[Var]) -> DataMaskBounds | None:
    of_rows, of_columns = not rows.isdisjoint(n.vars()), not columns.isdisjoint(n.vars())
    if of_columns and not of_rows:
        return DataMaskBounds(n if holds else Node("logical_not", (n,), "bool"))
    if not of_columns or len(n.args) != 2 or any(a.dtype not in _WHOLE for a in n.args):
        return None
    op = n.op if holds else _OPPOSITE.get(n.op, "eq" if n.op == "ne" else "")
    row, column = n.args
    if not columns.isdisjoint(row.vars()):
        row, column, op = column, row, _TURNED.get(op, "")
    apart = columns.isdisjoint(row.vars()) and rows.isdisjoint(column.vars())
    return DataMaskBounds(column, op, row) if apart and op in _TURNED else None


def _parts(n: Node, holds: bool) -> Iterator[tuple[Node, bool]]:
    """Conditions all of which hold (or do not, by the number beside them) where a condition holds (or does not)."""
    if n.op in _NOT and n.args[0].dtype == "bool":
        yield from _parts(n.args[0], not holds)
    elif n.op in (_AND if holds else _OR) and all(a.dtype == "bool" for a in n.args):
        for a in n.args:
            yield from _parts(a, holds)
    else:
        yield n, holds


def mask_bounds(logits: Node, row: Var, column: Var) -> MaskBounds:
    """What the outermost choices of a logit say, those with -inf on one side: the logits of all other columns are -inf."""
    found: list[MaskBounds] = []
    while (choice := _choice(logits)) is not None:
        condition, holds, logits = choice
        found += [live for c in _conditions(condition, holds) if (live := _bound(c, row, column)) is not None]
    return _all(found)


@dataclass(frozen=True)
class Free:
    """A logit without the outermost choices that ask nothing but coordinates: their conditions (each with what it is for the logit), and the
    columns for which all of them take the logit.
    """

    logits: Node
    conditions: tuple[tuple[Node, bool], ...] = ()
    live: MaskBounds = MaskBounds()


def free_columns(logits: Node, row: Var, column: Var) -> Free:
    """A logit, and what is asked before it counts."""
    found: list[MaskBounds] = []
    asked: list[tuple[Node, bool]] = []
    while logits.op == "where" and (choice := _choice(logits)) is not None:
        condition, holds, inner = choice
        bounds = [_bound(c, row, column) for c in _conditions(condition, holds)]
        if None in bounds:
            break
        found += [live for live in bounds if live is not None]
        asked.append((condition, holds))
        logits = inner
    return Free(logits, tuple(asked), _all(found))


def _all(found: list[MaskBounds]) -> MaskBounds:
    return MaskBounds(
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


def _bound(gap: Expr | None, row: Var, column: Var) -> MaskBounds | None:
    """The columns for which an expression is not negative, if it is a difference of row and column."""
    if gap is None:
        return None
    if (rest := gap - of(row) + of(column)).is_const:
        return MaskBounds(behind=int(rest))
    if (rest := gap - of(column) + of(row)).is_const:
        return MaskBounds(before=int(rest))
    return None


def _conditions(n: Node, holds: bool) -> Iterator[Expr | None]:
    """Expressions that are not negative where a condition holds (or does not), and None for each part of it that is none; only where none of
    them is negative it holds, if there is no None.
    """
    for part, true in _parts(n, holds):
        left, right = (_coordinate(x) for x in part.args) if part.op in _OPPOSITE else (None, None)
        if left is None or right is None:
            yield None
        else:
            gap = left - right
            op = part.op if true else _OPPOSITE[part.op]
            yield {"ge": gap, "gt": gap - 1, "le": -gap, "lt": -gap - 1}[op]


def _coordinate(n: Node) -> Expr | None:
    if n.op == "index":
        return n.attr
    return expr(n.attr) if n.op == "const" and n.dtype == "int64" else None


__all__ = ["DataMaskBounds", "Free", "MaskBounds", "data_mask_bounds", "free_columns", "mask_bounds"]
