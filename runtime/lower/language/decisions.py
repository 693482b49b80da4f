"""Decisions about sizes in the spec language: what cannot be told before the sizes are known raises `UnsupportedError`."""

from __future__ import annotations

from typing import Any

from ....errors import UnsupportedError
from ...ir.index import Expr, expr, proves_less, proves_nonnegative
from ...ir.index import size as canonical
from ...ir.nodes import Size
from ..sizes.positive import from_one


def lt(a: Size, b: Size) -> bool:
    """`a < b`, if it can be told."""
    if isinstance(a, Expr) or isinstance(b, Expr):
        if isinstance(a, float) or isinstance(b, float):
            raise UnsupportedError(f"whether {a} < {b} is not known before the program runs")
        x, y = expr(a), expr(b)
        if proves_less(x, y):
            return True
        if proves_nonnegative(x - y):
            return False
        if (found := from_one(x, y)) is not None and proves_less(*found):
            return True
        if found is not None and proves_nonnegative(found[0] - found[1]):
            return False
        raise UnsupportedError(f"whether {x} < {y} is not known before the sizes are")
    return a < b


def le(a: Size, b: Size) -> bool:
    return not lt(b, a) if isinstance(a, Expr) or isinstance(b, Expr) else a <= b


def gt(a: Size, b: Size) -> bool:
    return lt(b, a)


def ge(a: Size, b: Size) -> bool:
    return le(b, a)


def least(*values: Any) -> Size:
    """The smallest of indices, given one by one or as a list."""
    items = values if len(values) > 1 else tuple(values[0])
    best = items[0]
    for x in items[1:]:
        best = x if lt(x, best) else best
    return best


def greatest(*values: Any) -> Size:
    items = values if len(values) > 1 else tuple(values[0])
    best = items[0]
    for x in items[1:]:
        best = x if lt(best, x) else best
    return best


def clamped(x: Size, lo: Size, hi: Size) -> Size:
    return least(greatest(x, lo), hi)


def ceildiv(a: Size, b: Size) -> Size:
    return canonical(-((-expr(a)) // b)) if isinstance(a, Expr) or isinstance(b, Expr) else -(-a // b)


def known(x: Size) -> int:
    """An index as a Python int."""
    if isinstance(x, Expr):
        if not x.is_const:
            raise UnsupportedError(f"{x} is not known before the sizes are")
        return int(x)
    return x
