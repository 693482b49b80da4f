"""What values a scalar expression can have, as far as its operations alone tell: which positions need no check."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

from .index import bounds
from .nodes import FLOATS, Node

Range = tuple[Any, Any]
"""Least and greatest number, None where there is no such bound (of a float also where it may be NaN)."""
UNKNOWN: Range = (None, None)
_DTYPE_RANGES: dict[str, Range] = {
    "bool": (0, 1), "uint8": (0, 255), "int8": (-128, 127), "int16": (-(2**15), 2**15 - 1), "int32": (-(2**31), 2**31 - 1),
}  # fmt: skip
_FINITE = 2**15  # in every floating dtype
_ROUNDING = 2.0**-7  # one rounding of bfloat16 moves a value by less; 0 stays
_EXACT = 2**53  # beyond, a float's bound says nothing sure of an integer


def value_range(root: Node) -> Range:
    """Bounds of an expression's value: integers that wrapped round, and floats that may be NaN or infinite, have none."""
    found: dict[Node, Range] = {}
    for n in root.walk():
        found[n] = _checked(n, _of(n, [found[a] for a in n.args]))
    return found[root]


def _checked(n: Node, r: Range) -> Range:
    lo, hi = r
    if n.dtype in FLOATS:
        if lo is None or hi is None or not isfinite(lo) or not isfinite(hi) or max(-lo, hi) > _FINITE:
            return UNKNOWN
        return r if n.op == "const" else (lo - abs(lo) * _ROUNDING, hi + abs(hi) * _ROUNDING)
    least, most = _DTYPE_RANGES.get(n.dtype, (-(2**63), 2**63 - 1))
    if (lo is not None and lo < least) or (hi is not None and hi > most):
        return _DTYPE_RANGES.get(n.dtype, UNKNOWN)
    plain = _DTYPE_RANGES.get(n.dtype, UNKNOWN)
    return plain[0] if lo is None else lo, plain[1] if hi is None else hi


def _of(n: Node, args: list[Range]) -> Range:
    if n.op == "const":
        return (n.attr, n.attr) if n.attr == n.attr else UNKNOWN
    if n.op == "index":
        return bounds(n.attr)
    if n.op == "bounded":
        hi = args[1][1]
        return 0, None if hi is None else max(hi - 1, 0)
    if n.op == "load" and n.args:
        return UNKNOWN
    rule = _RULES.get(n.op)
    if rule is not None:
        return rule(*args)
    if n.op == "to_dtype":
        return _converted(n, args[0])
    known = [x for r in args for x in r]
    if n.op not in _SUMS or None in known:
        return UNKNOWN
    (a, b), (c, d) = args
    ends = {"add": (a + c, b + d), "sub": (a - d, b - c)}.get(n.op) or [x * y for x in (a, b) for y in (c, d)]
    return min(ends), max(ends)


def _converted(n: Node, r: Range) -> Range:
    lo, hi = r
    if n.args[0].dtype not in FLOATS:
        return r
    if n.dtype in FLOATS or lo is None or hi is None or max(-lo, hi) > _EXACT:
        return r if n.dtype in FLOATS else UNKNOWN
    return int(lo), int(hi)


def _minimum(a: Range, b: Range) -> Range:
    tops = [x for x in (a[1], b[1]) if x is not None]
    return None if None in (a[0], b[0]) else min(a[0], b[0]), min(tops, default=None)


def _maximum(a: Range, b: Range) -> Range:
    lows = [x for x in (a[0], b[0]) if x is not None]
    return max(lows, default=None), None if None in (a[1], b[1]) else max(a[1], b[1])


def _where(_: Range, a: Range, b: Range) -> Range:
    return None if None in (a[0], b[0]) else min(a[0], b[0]), None if None in (a[1], b[1]) else max(a[1], b[1])


def _abs(a: Range) -> Range:
    lo, hi = a
    if lo is None or hi is None:
        return (lo, None) if lo is not None and lo >= 0 else UNKNOWN  # the lowest integer has no positive
    return max(lo, -hi, 0), max(-lo, hi)


def _floor(a: Range) -> Range:
    return a if None in a else (a[0] // 1, a[1] // 1)


def _remainder(_: Range, b: Range) -> Range:
    lo, hi = b
    return (0, hi - 1) if lo is not None and hi is not None and lo > 0 and type(hi) is int else UNKNOWN


_SUMS = ("add", "sub", "mul")
_RULES: dict[str, Callable[..., Range]] = {
    "minimum": _minimum, "maximum": _maximum, "where": _where, "abs": _abs, "floor": _floor, "remainder": _remainder,
}  # fmt: skip

__all__ = ["value_range"]
