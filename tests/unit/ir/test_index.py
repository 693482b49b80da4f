"""Index arithmetic: simplification never changes a value, and the simplifications that fusion depends on do happen."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from opforge.runtime.ir.index import (
    Expr,
    Quotient,
    Sym,
    Var,
    bounds,
    divmod_,
    expr,
    of,
    proves_less,
    recombine,
    sym,
    var,
)

EXTENTS = (2, 3, 4, 6)
VARS = [Var(f"v{k}", n) for k, n in enumerate(EXTENTS)]


def evaluate(e: Expr, values: dict[Var, int]) -> int:
    """The value by definition, without simplification."""
    total = 0
    for monomial, c in e.terms:
        piece = c
        for a in monomial:
            if isinstance(a, Quotient):
                num, den = evaluate(a.num, values), evaluate(a.den, values)
                piece *= num // den if a.kind == "//" else num % den
            else:
                assert isinstance(a, Var)
                piece *= values[a]
        total += piece
    return total


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> tuple[Expr, object]:
    """An expression and the same thing as a Python function of the variables."""
    if depth == 0 or draw(st.booleans()):
        if draw(st.booleans()):
            n = draw(st.integers(0, 12))
            return expr(n), lambda _, n=n: n
        v = draw(st.sampled_from(VARS))
        return of(v), lambda values, v=v: values[v]
    a, fa = draw(expressions(depth - 1))
    op = draw(st.sampled_from("+*-/%"))
    if op in "/%":
        n = draw(st.sampled_from((1, 2, 3, 4, 6, 12, 24)))
        q, r = divmod_(a, expr(n))
        return (q, lambda values: fa(values) // n) if op == "/" else (r, lambda values: fa(values) % n)
    b, fb = draw(expressions(depth - 1))
    if op == "+":
        return a + b, lambda values: fa(values) + fb(values)
    if op == "-":
        return a - b, lambda values: fa(values) - fb(values)
    return a * b, lambda values: fa(values) * fb(values)


@settings(max_examples=300, deadline=None)
@given(expressions(depth=4))
def test_simplification_keeps_values_and_bounds_hold(pair: tuple[Expr, object]) -> None:
    e, f = pair
    lo, hi = bounds(e)
    joined = recombine(e)
    for point in itertools.product(*(range(n) for n in EXTENTS)):
        values = dict(zip(VARS, point, strict=True))
        exact = f(values)  # type: ignore[operator]
        assert evaluate(e, values) == exact
        assert evaluate(joined, values) == exact
        assert lo is None or lo <= exact
        assert hi is None or exact <= hi


def test_reshape_there_and_back_is_the_identity() -> None:
    i, j, k = var("i0", 12), var("i1", 32), var("i2", 384)
    flat = (i * 32 + j) * 384 + k
    assert flat // 384 % 32 is j
    assert flat % 384 is k
    assert flat // (384 * 32) is i


def test_a_size_that_is_rounded_up_has_one_form() -> None:
    """`x[:, ::2]` of two symbols' sum: torch says `(s27 + s86 + 1) // 2`, and the lowering said `-((-s27 - s86) // 2)`."""
    a, b = sym("s27"), sym("s86")
    for n in (2, 3, 5):
        assert -((-a - b) // n) is (a + b + n - 1) // n
    for number in range(12):
        rounded = (-((-a - 1) // 3)).subst({a.atom: number})  # type: ignore[dict-item]
        assert int(rounded) == -((-number - 1) // 3)


def test_symbolic_sizes_simplify() -> None:
    n = sym("s0")
    i, j = var("i0", n), var("i1", 64)
    assert (i * 64 + j) // 64 is i
    assert (i * 64 + j) % 64 is j
    m = var("i2", n)
    assert (i * n + m) // n is i
    assert (i * n + m) % n is m
    assert proves_less(m, n)
    assert not proves_less(n, m)
    half = var("i3", n) // 2
    assert proves_less(half, (n + 1) // 2)
    assert half // ((n + 1) // 2) == 0
    assert not proves_less(half, n // 2)  # the last of an odd number has no partner


def test_variables_of_one_name_and_other_extent_are_different() -> None:
    a, b = of(Var("q", 100)) // 20, of(Var("q", 200)) // 20
    assert a is not b
    assert bounds(a) == (0, 4)
    assert bounds(b) == (0, 9)


def test_an_extent_is_not_taken_for_a_term() -> None:
    """`(i < n) - 1` and `(i < n - 1)` have the same characters, and are two: so are their remainders."""
    n = sym("n")
    before, shorter = var("i", n) - 1, var("i", n - 1)
    assert before.key != shorter.key
    assert before % 2 != shorter % 2
    assert (before % 2).subst({Var("i", n): expr(4)}) == 1


def test_remainders_of_recombined_indices() -> None:
    a = 2 * var("a", 6)
    assert (a % 3 + 3 * (a // 3)) % 2 == 0
    assert (a % 3 + 3 * (a // 3)) // 2 == var("a", 6)


def test_split_indices_recombine() -> None:
    q = of(Var("q", 96))
    assert recombine((q // 8) * 3072 + (q % 8) * 384) is q * 384


def test_an_index_of_extent_one_is_zero() -> None:
    assert var("i", 1).is_const
    assert int(var("i", 1)) == 0


def test_symbols_have_no_upper_bound() -> None:
    assert bounds(sym("s7")) == (0, None)
    assert isinstance(sym("s7").atom, Sym)


def test_quotient_and_remainder_of_a_sum_recombine() -> None:
    """A place in a concatenation of symbolic sizes, as row and column and back: longer than the two parts, but without a division."""
    i = var("i", 100)
    x = i - sym("a") * sym("b") - sym("c") * sym("d")
    n = sym("n")
    assert recombine((x // n) * n + x % n) is x
    assert recombine(i + (x // n) * n + x % n) is i + x
