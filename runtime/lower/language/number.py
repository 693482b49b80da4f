"""A Python number that changes from call to call, while an operator is lowered: a float that Dynamo has made a symbol of.

Kernels compute in double what the program computes of it. `lower/numbers.py` says where such numbers come from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

from ....errors import UnsupportedError
from ...ir.index import Expr, Sym
from ...ir.nodes import Node, const, index_node


class Number:
    """A number of which only the kernels know the value: `node`, an elem of float64 without coordinates. It counts as a Python float in promotion;
    nothing can be decided by it.
    """

    __slots__ = ("node",)
    __hash__ = None  # type: ignore[assignment]
    dtype = "float32"

    def __init__(self, node: Node) -> None:
        self.node = node

    def __repr__(self) -> str:
        return f"Number({self.node})"

    def _decides(self, *_: object) -> NoReturn:
        raise UnsupportedError("a Python number that changes between calls decides what is computed")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = _decides

    def __neg__(self) -> Number:
        return Number(-self.node)

    def __add__(self, other: Any) -> Any:
        return applied(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return applied(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return applied(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return applied(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return applied(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return applied(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return applied(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return applied(operator.truediv, other, self)

    def __pow__(self, other: Any) -> Any:
        return applied(operator.pow, self, other)

    def __rpow__(self, other: Any) -> Any:
        return applied(operator.pow, other, self)


def as_double(x: Any) -> Node | None:
    """A number as an elem of float64; None for what is none, and where Python computes it."""
    if isinstance(x, Number):
        return None if isinstance(x, Truth) else x.node
    if isinstance(x, Expr):
        return Node("to_dtype", (index_node(x),), "float64") if _fits(x) else None
    return const(float(x), "float64") if isinstance(x, (int, float)) else None


def _fits(x: Expr) -> bool:
    """Whether code computes an integer in 64 bits: a symbol, or one plus a constant. A product may need more, so Python computes it. That a program's
    own integer lies within a constant of 2^63 is not looked at.
    """
    return all(not m or (len(m) == 1 and isinstance(m[0], Sym) and abs(factor) == 1) for m, factor in x.terms) and (
        sum(bool(m) for m, _ in x.terms) <= 1
    )


def applied(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """A Number that a function of two makes of others; NotImplemented where `as_double` has none."""
    left, right = as_double(a), as_double(b)
    if left is None or right is None:
        return NotImplemented  # a tensor's own operators take numbers
    return Number(function(left, right))


class Truth(Number):
    """A bool of which only the kernels know the value: `node`, an elem of bool without coordinates. It counts as a Python bool in promotion."""

    __slots__ = ()
    dtype = "bool"
