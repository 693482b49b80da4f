"""What conditions on coordinates leave open."""

from __future__ import annotations

import pytest

from opforge.runtime.ir.index import Expr, Var, expr, of
from opforge.runtime.ir.nodes import Node, index_node
from opforge.runtime.schedule.check_conditions import settled

ROW, COLUMN = Var("i", 4), Var("j", 6)
FLAT = of(ROW) * 6 + of(COLUMN)


def compare(op: str, a: Expr, b: int) -> Node:
    return Node(op, (index_node(a), index_node(expr(b))), "bool")


@pytest.mark.parametrize(
    ("conditions", "values"),
    [
        ([("lt", FLAT, 3)], {ROW: 0}),
        ([("le", FLAT, 0)], {ROW: 0, COLUMN: 0}),
        ([("lt", FLAT, 7)], {}),
        ([("ge", FLAT, 18)], {ROW: 3}),
        ([("ge", FLAT, 17)], {}),
        ([("ge", FLAT, 8), ("lt", FLAT, 11)], {ROW: 1}),
        ([("gt", of(COLUMN), 4)], {COLUMN: 5}),
        ([("lt", of(ROW) * of(COLUMN), 1)], {}),
    ],
)
def test_settled(conditions: list[tuple[str, Expr, int]], values: dict[Var, int]) -> None:
    found = settled(frozenset(compare(*c) for c in conditions))
    assert found == {v: expr(n) for v, n in values.items()}
