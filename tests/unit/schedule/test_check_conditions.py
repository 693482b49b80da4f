"""What conditions on coordinates leave open."""

from __future__ import annotations

import pytest

from opforge.runtime.ir.index import Expr, Var, bounds, expr, of, proves_less, proves_nonnegative, sym
from opforge.runtime.ir.nodes import Node, index_node
from opforge.runtime.schedule.check_conditions import narrowed

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
