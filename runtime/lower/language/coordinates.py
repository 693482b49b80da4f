"""Shapes and coordinates in the spec language: broadcast, reshaped, sliced."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

from ....errors import UnsupportedError
from ...ir.index import Expr, expr, product
from ...ir.index import size as canonical
from ...ir.nodes import Size
from .decisions import ceildiv

_SLICE_END = 2**62  # "to the end" in torch's schemas is the largest int64


def broadcast(*shapes: Sequence[Size]) -> list[Size]:
    """The common shape. Two sizes must be equal expressions, or one of them 1."""
    n = max((len(each) for each in shapes), default=0)
    out: list[Size] = [1] * n
    for each in shapes:
        for k, x in enumerate(each, n - len(each)):
            if out[k] == 1:
                out[k] = x
            elif x != 1 and x != out[k]:
                raise UnsupportedError(f"sizes {out[k]} and {x} are not known to be equal")
    return out


def broadcasted(i: Sequence[Size], shape_: Sequence[Size]) -> list[Size]:
    """Coordinates for an operand of `shape_` from those of the common shape. Raises UnsupportedError where it does not broadcast to that, or where
    symbolic sizes leave it open.
    """
    if len(shape_) > len(i):
        raise UnsupportedError(f"{list(shape_)} has more dimensions than what it is broadcast to")
    tail = i[len(i) - len(shape_) :]
    for x, n in zip(tail, shape_, strict=True):
        extent = 1 if isinstance(x, int) else n if x.var is None else x.var.extent
        if n not in (1, extent):
            raise UnsupportedError(f"{n} elements are not broadcast to {extent}")
    return [0 if n == 1 else x for x, n in zip(tail, shape_, strict=True)]


def inferred(values: Sequence[Size], n: Size) -> list[Size]:
    """A shape with a single -1 replaced so that it holds `n` elements."""
    values = [canonical(x) for x in values]
    if -1 not in values:
        return values
    rest = product(x for x in values if x != -1)
    if rest == 0:
        raise UnsupportedError("a -1 size of an empty tensor is ambiguous")
    return [canonical(expr(n) // rest) if x == -1 else x for x in values]


def linear(i: Sequence[Size], shape_: Sequence[Size]) -> Size:
    """Row-major position of the coordinates `i` in `shape_`."""
    at: Size = 0
    for x, n in zip(i, shape_, strict=True):
        at = at * n + x if at != 0 else x
    return at


def unlinear(at: Size, shape_: Sequence[Size]) -> list[Size]:
    """Coordinates in `shape_` of the row-major position `at`, which must be inside."""
    if 0 in shape_:
        return [0] * len(shape_)  # no position is inside, and no loop goes there
    out: list[Size] = []
    step: Size = 1
    alone = all(n == 1 for n in shape_)
    for k in range(len(shape_) - 1, -1, -1):
        n = shape_[k]
        if n == 1:
            out.append(at if alone and not out else 0)  # `at` may be a position that is to be checked
            continue
        digit = expr(at) // step
        if any(x != 1 for x in shape_[:k]):
            digit = digit % n
        out.append(digit)
        step = canonical(expr(step) * n)
    return out[::-1]


def reshaped(i: Sequence[Size], to_: Sequence[Size], shape_: Sequence[Size]) -> list[Size]:
    """Coordinates in `shape_` of the element at `i` in the shape `to_`, where both hold the same elements in row-major order.

    Dimensions are matched in the smallest groups of equal product, so that untouched ones keep their variable.
    """
    if 0 in shape_ or 0 in to_:
        return [0] * len(shape_)
    out: list[Size] = []
    a, b = len(to_), len(shape_)
    while a > 0 or b > 0:
        a0, b0 = a - 1, b - 1
        pa: Size = to_[a0] if a0 >= 0 else 1
        pb: Size = shape_[b0] if b0 >= 0 else 1
        while pa != pb:
            if b0 > 0 and (a0 <= 0 or _smaller(pb, pa)):
                b0 -= 1
                pb = canonical(expr(pb) * shape_[b0])
            elif a0 > 0:
                a0 -= 1
                pa = canonical(expr(pa) * to_[a0])
            elif isinstance(pa, int) and isinstance(pb, int):
                raise UnsupportedError(f"shapes {list(to_)} and {list(shape_)} do not hold as many elements")
            else:
                break  # what is left on both sides are as many elements by a guard
        a0, b0 = max(a0, 0), max(b0, 0)
        if b > b0:
            group = shape_[b0:b]
            if a - a0 == 1 and b - b0 == 1:
                out = [expr(i[a0]) if shape_[b0] != 1 else 0, *out]
            else:
                out = [*unlinear(linear(i[a0:a], to_[a0:a]), group), *out]
        a, b = a0, b0
    return out


def _smaller(a: Size, b: Size) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    # Which side grows next is only a search order: a wrong guess makes the group larger, never the result wrong.
    return len(str(a)) < len(str(b)) if not isinstance(a, int) or not isinstance(b, int) else a < b


def steps(start: Any, end: Any, step: Any) -> Size:
    """How many of start, start + step, … come before `end`."""
    if isinstance(start, float) or isinstance(end, float) or isinstance(step, float):
        if not all(isinstance(x, (int, float)) for x in (start, end, step)):
            raise UnsupportedError("a range of floats and unknown sizes")
        return max(ceil((end - start) / step), 0)
    if isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
        return max(-((start - end) // step), 0)
    return ceildiv(expr(end) - start, step)


def sliced(start: Size | None, end: Size | None, n: Size) -> list[Size]:
    """`[start, end]` of a slice of `n` elements. An unknown size is taken to be large enough: the traced shape tells if it is not."""

    def bound(x: Size) -> Size:
        if isinstance(x, int) and x >= _SLICE_END:
            return n
        if isinstance(x, int) and x < 0:
            x = canonical(x + n)
        if isinstance(x, Expr) or isinstance(n, Expr):
            return x
        return min(max(x, 0), n)

    first = bound(0 if start is None else start)
    last = bound(_SLICE_END if end is None else end)
    return [first, last] if isinstance(first, Expr) or isinstance(last, Expr) else [first, max(first, last)]
