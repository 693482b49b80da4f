"""Columns that a program leaves out by coordinates."""

from __future__ import annotations

import pytest

from opforge.runtime.codegen.triton_live import Live, live_columns
from opforge.runtime.ir.index import Var, of
from opforge.runtime.ir.nodes import Node, const, index_node, load

ROW, COLUMN = Var("o0", 100), Var("r0", 100)
LOWEST = const(-float("inf"), "float32")
SCORE = load("score", (), "float32")
I, J = of(ROW), of(COLUMN)


def holds(op: str, *args: Node) -> Node:
    return Node(op, args, "bool")


def where(condition: Node, a: Node, b: Node) -> Node:
    return Node("where", (condition, a, b), a.dtype)


def at(e: object) -> Node:
    return index_node(e)  # type: ignore[arg-type]


CAUSAL = holds("ge", at(I), at(J))
NEAR = holds("lt", at(I - J), const(40, "int64"))
ALWAYS_TOLD = load("mask", (I, J), "bool")


@pytest.mark.parametrize(
    ("logits", "wanted"),
    [
        (SCORE, Live()),
        (where(CAUSAL, SCORE, LOWEST), Live(behind=0)),
        (where(holds("gt", at(I), at(J)), SCORE, LOWEST), Live(behind=-1)),
        (where(holds("lt", at(I), at(J)), LOWEST, SCORE), Live(behind=0)),
        (where(holds("le", at(J), at(I + 7)), SCORE, LOWEST), Live(behind=7)),
        (where(holds("lt", at(I), at(J)), SCORE, LOWEST), Live(before=-1)),
        (where(holds("logical_and", CAUSAL, NEAR), SCORE, LOWEST), Live(before=39, behind=0)),
        (where(CAUSAL, where(NEAR, SCORE, LOWEST), LOWEST), Live(before=39, behind=0)),
        (where(holds("logical_not", CAUSAL), LOWEST, SCORE), Live(behind=0)),
        (where(holds("logical_and", ALWAYS_TOLD, CAUSAL), SCORE, LOWEST), Live(behind=0)),
        # An alternative leaves out nothing, and neither does what is no plain difference, or another number than -inf.
        (where(holds("logical_or", CAUSAL, ALWAYS_TOLD), SCORE, LOWEST), Live()),
        (where(holds("logical_and", CAUSAL, NEAR), LOWEST, SCORE), Live()),
        (where(holds("ge", at(I * 2), at(J)), SCORE, LOWEST), Live()),
        (where(holds("ge", at(I // 16), at(J // 16)), SCORE, LOWEST), Live()),
        (where(CAUSAL, SCORE, const(-3e38, "float32")), Live()),
        (where(CAUSAL, SCORE, const(float("inf"), "float32")), Live()),
        (Node("add", (where(CAUSAL, SCORE, LOWEST), SCORE), "float32"), Live()),
    ],
)
def test_bounds(logits: Node, wanted: Live) -> None:
    assert live_columns(logits, ROW, COLUMN) == wanted
