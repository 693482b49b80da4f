"""Roundings of a score that are left out, and the factor that all logits have."""

from __future__ import annotations

import pytest

from opforge.runtime.ir.nodes import Node, const, load
from opforge.runtime.tile.logits import factored, score_dtype, unrounded

LOWEST = const(-float("inf"), "float32")
BIAS = load("bias", (0,), "float32")
MASK = load("mask", (0,), "bool")


def score(dtype: str = "float32") -> Node:
    return load("score", (), dtype)


def to(n: Node, dtype: str) -> Node:
    return Node("to_dtype", (n,), dtype)


def rounded(n: Node, dtype: str) -> Node:
    return to(to(n, dtype), "float32")


def mul(a: Node, factor: float) -> Node:
    return Node("mul", (a, const(factor, "float32")), "float32")


def add(a: Node, b: Node) -> Node:
    return Node("add", (a, b), "float32")


def where(condition: Node, a: Node, b: Node, dtype: str = "float32") -> Node:
    return Node("where", (condition, a, b), dtype)


def wide(dtype: str) -> Node:
    return to(score(dtype), "float32")


@pytest.mark.parametrize("factor", [0.125, 0.1])
def test_bfloat16_stays_float32(factor: float) -> None:
    scaled = rounded(mul(wide("bfloat16"), factor), "bfloat16")
    assert unrounded(scaled, "score") == mul(score(), factor)
    assert unrounded(rounded(add(scaled, BIAS), "bfloat16"), "score") == add(mul(score(), factor), BIAS)
    half = where(MASK, const(-1e30, "bfloat16"), to(mul(wide("bfloat16"), factor), "bfloat16"), "bfloat16")
    assert unrounded(to(half, "float32"), "score") == where(MASK, const(-1e30, "float32"), mul(score(), factor))


def test_float16_keeps_what_may_overflow_or_change_a_digit() -> None:
    assert unrounded(rounded(mul(wide("float16"), 0.125), "float16"), "score") == mul(wide("float16"), 0.125)
    for factor in (0.1, 2.0):
        logits = rounded(mul(wide("float16"), factor), "float16")
        assert unrounded(logits, "score") == logits
    logits = rounded(add(mul(wide("float16"), 0.125), BIAS), "float16")
    assert unrounded(logits, "score") == logits
    assert score_dtype(logits, "score") == "float16"


@pytest.mark.parametrize(
    "logits",
    [
        # A rounding may decide these.
        where(Node("gt", (wide("bfloat16"), const(0.5, "float32")), "bool"), wide("bfloat16"), LOWEST),
        Node("floor", (rounded(mul(wide("bfloat16"), 0.1), "bfloat16"),), "float32"),
        to(Node("to_dtype", (rounded(mul(wide("bfloat16"), 0.1), "bfloat16"),), "int32"), "float32"),
    ],
)
def test_what_is_not_smooth_keeps_its_roundings(logits: Node) -> None:
    assert unrounded(logits, "score") == logits


def test_roundings_of_other_values_stay() -> None:
    logits = add(wide("bfloat16"), rounded(BIAS, "bfloat16"))
    assert unrounded(logits, "score") == add(score(), rounded(BIAS, "bfloat16"))


@pytest.mark.parametrize(
    ("logits", "wanted"),
    [
        (score(), (score(), 1.0)),
        (mul(score(), 0.1), (score(), pytest.approx(0.1, rel=1e-7))),
        (where(MASK, mul(score(), 0.125), LOWEST), (where(MASK, score(), LOWEST), 0.125)),
        (where(MASK, LOWEST, mul(add(score(), BIAS), 0.5)), (where(MASK, LOWEST, add(score(), BIAS)), 0.5)),
        # Not by a number that turns the order around, or that may overflow; nor where only some logits have it.
        *((mul(score(), f), (mul(score(), f), 1.0)) for f in (-0.5, 0.0, 2.0, 1e-30)),
        (
            where(MASK, mul(score(), 0.5), const(-1e30, "float32")),
            (where(MASK, mul(score(), 0.5), const(-1e30, "float32")), 1.0),
        ),
        (where(MASK, mul(score(), 0.5), mul(score(), 0.25)), (where(MASK, mul(score(), 0.5), mul(score(), 0.25)), 1.0)),
        (add(mul(score(), 0.5), BIAS), (add(mul(score(), 0.5), BIAS), 1.0)),
    ],
)
def test_the_factor(logits: Node, wanted: tuple[Node, float]) -> None:
    assert factored(logits) == wanted
