"""Sums of sizes in addresses: by loop variables, each sum once."""

from __future__ import annotations

from opforge.runtime.ir.index import expr, sym, var
from opforge.runtime.render.cpp_sizes import by_loops, is_size, size_text, without_common

N, M = sym("n"), sym("m")
HALF = (N - 1) // 2
I, J = var("i", 8), var("j", 8)
SIZES = frozenset(("n", "m"))


def parts(e: object) -> dict[str, str]:
    return {"*".join(a.pretty for a in loops): size_text(f) for loops, f in by_loops(expr(e), SIZES)}


def test_by_loops() -> None:
    """A loop variable stands once, with all that multiplies it."""
    line = HALF * M + M + HALF + 1
    found = parts(line * I + line * 4 * J + J + 16 * line)
    assert list(found) == ["i", "j", ""]
    assert found["i"] == "floordiv<int64_t>(n - 1, 2) + floordiv<int64_t>(n - 1, 2) * m + m + 1"
    assert found["j"].endswith("+ m * 4 + 5")


def test_nothing_to_name() -> None:
    """Products of symbols are as short as a name, and what is no argument of the kernel cannot be computed before its loops."""
    assert not parts(I * 16 + J)
    assert not parts(I * N * M + J * N + M)
    assert not by_loops(I * (sym("k") + sym("l")), SIZES)


def test_a_divisor_that_may_be_zero_stays_in_its_loop() -> None:
    """Before the loops, which do not run where a size is 0, the division would end the process."""
    (quotient,) = (M // N).terms[0][0]
    assert not is_size(quotient, SIZES)
    assert not parts(I * (M // N))
    (quotient,) = HALF.terms[0][0]
    assert is_size(quotient, SIZES)


def test_multiples_share_a_name() -> None:
    """4 * (n + 1) and 6 * (n + 1) are multiples of one sum."""
    assert without_common(4 * N + 4) == (4, N + 1)
    assert without_common(6 * N + 6) == (6, N + 1)
