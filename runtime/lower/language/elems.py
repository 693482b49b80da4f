"""Coordinates of results, elements of tensors at them, and positions that data brings, which are checked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ....errors import UnsupportedError
from ...ir.facts import positive_for_sizes
from ...ir.guards import bounded, checks, masked
from ...ir.index import Expr, Val, expr, proves_less, proves_nonnegative
from ...ir.index import size as canonical
from ...ir.nodes import Node, Size, coordinates, index_node, indirect
from ...ir.pairs import element
from ...ir.ranges import value_range
from . import scalar_ops as s


class Elems:
    """`checks`: positions that data brings are checked where nothing proves them in range; `place` goes into the errors."""

    def __init__(self, checks: bool) -> None:
        self.checks, self.place = checks, ""
        self.may_be_empty: Collection[str] = ()  # size symbols that come from data
        self._shapes: dict[str, tuple[Size, ...]] = {}  # of what is read, where sizes may be 0
        self._error: str | None = None
        self._grids: dict[tuple[str, tuple[Size, ...]], tuple[Expr, ...]] = {}

    # -- coordinates ---------------------------------------------------------------------------------------------------
    def coords(self, shape: Sequence[Size]) -> list[Expr]:
        """One coordinate for each dimension of a result: `i0`, `i1`, …, and 0 where the size is 1."""
        return list(self.grid(tuple(map(canonical, shape))))

    def rcoords(self, over: Sequence[Size]) -> list[Expr]:
        """The coordinates reduced over, or the domain of a scatter."""
        return list(self.grid(tuple(map(canonical, over)), "r"))

    def grid(self, shape: tuple[Size, ...], prefix: str = "i") -> tuple[Expr, ...]:
        """`coordinates`, remembered: most tensors of a program share a few shapes."""
        found = self._grids.get((prefix, shape))
        if found is None:
            found = self._grids[prefix, shape] = coordinates(shape, prefix)
        return found

    def at(self, t: Any, index: Sequence[Size]) -> Node:
        """The elem of `t` at the coordinates, in the dtype of `t`."""
        if len(index) != len(t.shape):
            raise UnsupportedError(f"{len(index)} coordinates for {t}")
        if self.may_be_empty:
            self._shapes[t.name] = t.shape
        return element(t.name, [_coordinate(x, n) for x, n in zip(index, t.shape, strict=True)], t.dtype)

    # -- positions -----------------------------------------------------------------------------------------------------
    def raises(self, error: str) -> None:
        """What a position out of range raises in this operator (`nothing`: there is none, so none is checked); what the operator
        that calls this one says goes first.
        """
        self._error = self._error or error

    def index_of(self, value: Any, n: Size) -> Expr:
        """An integer elem as an index: negatives count from the end; what is then not within 0..n-1 is an error."""
        if not isinstance(value, Node):
            value = index_node(value)
        value = s.to_dtype(value, "int64")
        least = value_range(value)[0]
        if not ((value.op == "index" and proves_nonnegative(value.attr)) or (least is not None and least >= 0)):
            value = s.where(s.lt(value, 0), s.add(value, n), value)
        return self.place_of(value, n)

    def place_of(self, value: Any, n: Size) -> Expr:
        """An integer elem as an index; what is not within 0..n-1 is an error."""
        value = s.to_dtype(value, "int64") if isinstance(value, Node) else index_node(value)
        n = canonical(n)
        if self.checks and self._error != "nothing" and not _within(value, n):
            if not positive_for_sizes(expr(n)):
                raise UnsupportedError("a position in a dimension that may have no elements")
            value = bounded(value, n, self._error or "IndexError", self.place)
        return indirect(value, 0, n - 1 if isinstance(n, int) else None)

    # -- choices -------------------------------------------------------------------------------------------------------
    def first_of(self, conditions: Sequence[Any], values: Sequence[Any]) -> Any:
        """The value of the first condition that holds, reading nothing else; 0 when none holds."""
        result: Any = None
        for condition, value in zip(reversed(conditions), reversed(values), strict=True):
            if result is None:
                result = masked(value, condition) if isinstance(condition, Node) else value
            else:
                result = self.guarded(condition, value, result)
        return 0 if result is None else result

    def guarded(self, condition: Any, value: Any, other: Any) -> Node:
        """`value` where `condition`, reading nothing elsewhere; else `other`."""
        if not isinstance(condition, Node):
            return value if condition else s.coerced(other, value)
        return s.where(condition, masked(value, condition), other)


def _coordinate(x: Size, n: Size) -> Size:
    """`x`, or 0 in a dimension of size 1, unless it stands for a position that is to be checked."""
    if n != 1:
        return expr(x)
    return expr(x) if any(isinstance(a, Val) and checks([a.node]) for a in expr(x).atoms()) else 0


def _within(value: Node, n: Size) -> bool:
    """Whether a position is seen to be in 0..n-1."""
    if value.op == "index":
        return proves_nonnegative(value.attr) and proves_less(value.attr, expr(n))
    lo, hi = value_range(value)
    return lo is not None and hi is not None and lo >= 0 and proves_less(expr(int(hi)), expr(n))
