"""Columns that a program leaves out by coordinates."""

from __future__ import annotations

import pytest

from opforge.runtime.ir.index import Var, of
from opforge.runtime.ir.nodes import Node, const, index_node, load
from opforge.runtime.tile.mask_bounds import (
    DataMaskBounds,
    Free,
    MaskBounds,
    data_mask_bounds,
    free_columns,
    mask_bounds,
)

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
LATER, BOTH = holds("lt", at(I), at(J)), holds("logical_and", CAUSAL, NEAR)
ALWAYS_TOLD = load("mask", (I, J), "bool")


@pytest.mark.parametrize(
    ("logits", "wanted"),
    [
        (SCORE, MaskBounds()),
        (where(CAUSAL, SCORE, LOWEST), MaskBounds(behind=0)),
        (where(holds("gt", at(I), at(J)), SCORE, LOWEST), MaskBounds(behind=-1)),
        (where(holds("lt", at(I), at(J)), LOWEST, SCORE), MaskBounds(behind=0)),
        (where(holds("le", at(J), at(I + 7)), SCORE, LOWEST), MaskBounds(behind=7)),
        (where(holds("lt", at(I), at(J)), SCORE, LOWEST), MaskBounds(before=-1)),
        (where(holds("logical_and", CAUSAL, NEAR), SCORE, LOWEST), MaskBounds(before=39, behind=0)),
        (where(CAUSAL, where(NEAR, SCORE, LOWEST), LOWEST), MaskBounds(before=39, behind=0)),
        (where(holds("logical_not", CAUSAL), LOWEST, SCORE), MaskBounds(behind=0)),
        (where(holds("logical_and", ALWAYS_TOLD, CAUSAL), SCORE, LOWEST), MaskBounds(behind=0)),
        # An alternative leaves out nothing, and neither does what is no plain difference, or another number than -inf.
        (where(holds("logical_or", CAUSAL, ALWAYS_TOLD), SCORE, LOWEST), MaskBounds()),
        (where(holds("logical_and", CAUSAL, NEAR), LOWEST, SCORE), MaskBounds()),
        (where(holds("ge", at(I * 2), at(J)), SCORE, LOWEST), MaskBounds()),
        (where(holds("ge", at(I // 16), at(J // 16)), SCORE, LOWEST), MaskBounds()),
        (where(CAUSAL, SCORE, const(-3e38, "float32")), MaskBounds()),
        (where(CAUSAL, SCORE, const(float("inf"), "float32")), MaskBounds()),
        (Node("add", (where(CAUSAL, SCORE, LOWEST), SCORE), "float32"), MaskBounds()),
    ],
)
def test_bounds(logits: Node, wanted: MaskBounds) -> None:
    assert mask_bounds(logits, ROW, COLUMN) == wanted


@pytest.mark.parametrize(
    ("logits", "wanted"),
    [
        (SCORE, Free(SCORE)),
        (where(CAUSAL, SCORE, LOWEST), Free(SCORE, ((CAUSAL, True),), MaskBounds(behind=0))),
        (where(LATER, LOWEST, SCORE), Free(SCORE, ((LATER, False),), MaskBounds(behind=0))),
        (
            where(CAUSAL, where(NEAR, SCORE, LOWEST), LOWEST),
            Free(SCORE, ((CAUSAL, True), (NEAR, True)), MaskBounds(before=39, behind=0)),
        ),
        (where(BOTH, SCORE, LOWEST), Free(SCORE, ((BOTH, True),), MaskBounds(before=39, behind=0))),
        # A choice that asks something else too has to be made everywhere, and so has all that is inside of it.
        *(
            (logits, Free(logits))
            for logits in (
                where(holds("logical_and", ALWAYS_TOLD, CAUSAL), SCORE, LOWEST),
                where(ALWAYS_TOLD, where(CAUSAL, SCORE, LOWEST), LOWEST),
                where(holds("logical_or", CAUSAL, ALWAYS_TOLD), SCORE, LOWEST),
                where(holds("ge", at(I * 2), at(J)), SCORE, LOWEST),
            )
        ),
        (
            where(CAUSAL, where(ALWAYS_TOLD, SCORE, LOWEST), LOWEST),
            Free(where(ALWAYS_TOLD, SCORE, LOWEST), ((CAUSAL, True),), MaskBounds(behind=0)),
        ),
    ],
)
def test_choices_that_only_ask_coordinates(logits: Node, wanted: Free) -> None:
    assert free_columns(logits, ROW, COLUMN) == wanted


OF_ROW, OF_COLUMN, LENGTH = load("ids", (I,), "int64"), load("ids", (J,), "int64"), load("lengths", (0,), "int64")
PADDED = load("padded", (J,), "bool")


@pytest.mark.parametrize(
    ("logits", "wanted"),
    [
        (where(holds("eq", OF_ROW, OF_COLUMN), SCORE, LOWEST), [DataMaskBounds(OF_COLUMN, "eq", OF_ROW)]),
        (where(holds("eq", OF_COLUMN, OF_ROW), SCORE, LOWEST), [DataMaskBounds(OF_COLUMN, "eq", OF_ROW)]),
        (where(holds("ne", OF_ROW, OF_COLUMN), LOWEST, SCORE), [DataMaskBounds(OF_COLUMN, "eq", OF_ROW)]),
        (where(holds("le", OF_COLUMN, OF_ROW), SCORE, LOWEST), [DataMaskBounds(OF_COLUMN, "ge", OF_ROW)]),
        (where(holds("lt", OF_ROW, OF_COLUMN), LOWEST, SCORE), [DataMaskBounds(OF_COLUMN, "ge", OF_ROW)]),
        (where(holds("gt", OF_ROW, at(J)), SCORE, LOWEST), [DataMaskBounds(at(J), "gt", OF_ROW)]),
        (where(PADDED, LOWEST, SCORE), [DataMaskBounds(holds("logical_not", PADDED))]),
        (where(PADDED, SCORE, LOWEST), [DataMaskBounds(PADDED)]),
        (where(holds("lt", at(J), LENGTH), SCORE, LOWEST), [DataMaskBounds(holds("lt", at(J), LENGTH))]),
        (
            where(holds("logical_and", CAUSAL, holds("eq", OF_ROW, OF_COLUMN)), where(PADDED, LOWEST, SCORE), LOWEST),
            [DataMaskBounds(OF_COLUMN, "eq", OF_ROW), DataMaskBounds(holds("logical_not", PADDED))],
        ),
        # Coordinates are told without a look; a number for each row and column, an alternative, and what only forbids one number leave out nothing.
        (where(CAUSAL, SCORE, LOWEST), []),
        (where(ALWAYS_TOLD, SCORE, LOWEST), []),
        (where(holds("logical_or", CAUSAL, PADDED), SCORE, LOWEST), []),
        (where(holds("ne", OF_ROW, OF_COLUMN), SCORE, LOWEST), []),
        (where(holds("eq", OF_ROW, OF_COLUMN), LOWEST, SCORE), []),
        (where(holds("gt", Node("add", (OF_ROW, OF_COLUMN), "int64"), LENGTH), SCORE, LOWEST), []),
        (where(holds("gt", load("x", (I,), "float32"), load("y", (J,), "float32")), SCORE, LOWEST), []),
        (where(holds("gt", SCORE, load("y", (J,), "float32")), SCORE, LOWEST), []),
        (where(PADDED, SCORE, const(0, "float32")), []),
    ],
)
def test_columns_that_data_leave_out(logits: Node, wanted: list[DataMaskBounds]) -> None:
    assert data_mask_bounds(logits, (ROW,), (COLUMN,), "score") == wanted
