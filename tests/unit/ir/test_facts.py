"""Facts about index expressions: what the checker of plans may take for proven, and what it may not."""

from __future__ import annotations

from opforge.runtime.ir.facts import covers
from opforge.runtime.ir.index import Var, of, sym

N, K = sym("cover_n"), sym("cover_k")
BLOCKS = -((-K) // 8)  # as torch says of a size that is rounded up


def test_a_dimension_with_a_loop_of_its_own_is_covered_whatever_its_size_is() -> None:
    i, j = Var("i", N), Var("j", BLOCKS)
    assert covers((of(i), of(j)), (N, BLOCKS), (i, j))
    assert covers((of(j), of(i)), (BLOCKS, N), (i, j))
    padded = 3 * K + N - 2 * ((3 * K + 1) // 2) + 1
    loops = [Var(f"o{k}", padded) for k in range(3)]
    assert covers([of(v) for v in loops], (padded,) * 3, loops)


def test_the_other_dimensions_are_proven_as_before() -> None:
    i, j, k = Var("i", BLOCKS), Var("j", 2), Var("k", 4)
    assert covers((of(i), of(j) * 4 + of(k)), (BLOCKS, 8), (i, j, k))
    assert not covers((of(i), of(j) * 3 + of(k)), (BLOCKS, 8), (i, j, k))
    assert not covers((of(i), of(j) * 4 + of(k)), (BLOCKS, 9), (i, j, k))


def test_what_is_not_visited_once_is_not_covered() -> None:
    i, j, short = Var("i", N), Var("j", BLOCKS), Var("i", N - 1)
    assert not covers((of(i), of(i)), (N, N), (i, j))  # a diagonal
    assert not covers((of(i), of(j) + of(i)), (N, BLOCKS), (i, j))
    assert not covers((of(i),), (N,), (i, j))  # each element once for every j
    assert not covers((of(short),), (N,), (short,))
    assert not covers((of(i), of(i)), (N, N), (i,))
