"""What conditions on coordinates leave open."""

from __future__ import annotations

import time

import pytest

from opforge.runtime.check.conditions import extremes, narrowed
from opforge.runtime.ir.facts import evaluate, points, variables
from opforge.runtime.ir.index import Expr, Var, bounds, divmod_, expr, of, proves_less, proves_nonnegative, sym
from opforge.runtime.ir.nodes import Node, index_node

ROW, COLUMN = Var("i", 4), Var("j", 6)
FLAT = of(ROW) * 6 + of(COLUMN)


def compare(op: str, a: Expr, b: int) -> Node:
    return Node(op, (index_node(a), index_node(expr(b))), "bool")


@pytest.mark.parametrize(
    ("conditions", "values"),
    [
        ([("lt", FLAT, 3)], {ROW: (0, 0), COLUMN: (0, 2)}),
        ([("le", FLAT, 0)], {ROW: (0, 0), COLUMN: (0, 0)}),
        ([("lt", FLAT, 7)], {ROW: (0, 1)}),
        ([("ge", FLAT, 18)], {ROW: (3, 3)}),
        ([("ge", FLAT, 17)], {ROW: (2, 3)}),
        ([("ge", FLAT, 8), ("lt", FLAT, 11)], {ROW: (1, 1), COLUMN: (2, 4)}),
        ([("gt", of(COLUMN), 4)], {COLUMN: (5, 5)}),
        ([("lt", of(ROW) * of(COLUMN), 1)], {}),
    ],
)
def test_narrowed(conditions: list[tuple[str, Expr, int]], values: dict[Var, tuple[int, int]]) -> None:
    found = narrowed(frozenset(compare(*c) for c in conditions))
    assert {v: bounds(e) for v, e in found.items()} == values


def test_narrowed_of_unknown_size() -> None:
    """The first rows left out of a number of rows that is a symbol."""
    rows = Var("i", sym("s0"))
    found = narrowed(frozenset((compare("ge", of(rows), 2),)))[rows]
    assert proves_nonnegative(found - 2)
    assert proves_less(found, sym("s0"))
    assert not proves_nonnegative(found - 3)
    assert not proves_less(found, sym("s0") - 1)


APART = of(ROW) * 6 - of(COLUMN)
QUARTER = divmod_(FLAT, expr(4))[0]


@pytest.mark.parametrize("e", [FLAT, FLAT + 5, -FLAT, QUARTER, APART, of(ROW)], ids=str)
@pytest.mark.parametrize("read", [FLAT, -FLAT + 20, QUARTER, APART, of(COLUMN)], ids=str)
@pytest.mark.parametrize("least", [0, 3, 18, 30])
@pytest.mark.parametrize("most", [-9, 5, 19])
def test_extremes(e: Expr, read: Expr, least: int, most: int) -> None:
    """Of limits of one expression they are looked up, of others found point by point: either way as the points say."""
    assumed = frozenset((compare("ge", read, least), compare("le", read, most), compare("lt", read, 40)))
    shares_loop = not set(variables([e])).isdisjoint(variables([read]))  # conditions on other loops are not looked at
    every = points((ROW, COLUMN)) or ()
    met = [evaluate(e, p) for p in every if not shares_loop or least <= evaluate(read, p) <= most]
    assert extremes(e, assumed) == ((min(met), max(met)) if met else None)


def test_extremes_of_many_parts() -> None:
    """A split into many parts asks for each part under the limits of all before it: not all points for each."""

    def seconds(name: str, parts: int) -> float:
        place = of(Var(name, parts)) * 8 + of(Var("j", 8))
        limits = [compare("ge", place, 8 * k) for k in range(parts)]
        start = time.process_time()
        for k in range(1, parts):
            assert extremes(place - 8 * k, frozenset(limits[:k])) == (-8, 8 * (parts - k) - 1)
        return time.process_time() - start

    seconds("first", 64)
    few, many = (min(seconds(name, n) for name in "abc") for n in (128, 512))  # names that no cache has seen
    assert many < 40 * few, (few, many)  # the pairs of parts and limits: 16 times
