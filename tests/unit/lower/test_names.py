"""Helper names of the spec language: promotion as torch does it, coordinates of reshaped tensors, decisions about unknown sizes."""

import itertools

import pytest
import torch

from opforge.errors import UnsupportedError
from opforge.runtime.ir.facts import evaluate
from opforge.runtime.ir.index import expr, sym
from opforge.runtime.ir.nodes import DTYPES, coordinates
from opforge.runtime.lower.language import names
from opforge.runtime.lower.language.builder import Builder
from opforge.runtime.lower.language.tensor import Tensor


@pytest.mark.parametrize("a", DTYPES)
@pytest.mark.parametrize("b", DTYPES)
def test_promotion_of_dtypes_is_torchs(a: str, b: str) -> None:
    assert names.promote_types(a, b) == str(torch.promote_types(getattr(torch, a), getattr(torch, b))).removeprefix(
        "torch."
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "int64", "bool"])
@pytest.mark.parametrize(
    "other", [True, 3, 2.5, ("float64", ()), ("int64", ()), ("float32", (2,)), ("uint8", (2,)), ("bfloat16", ())]
)
def test_promotion_with_numbers_and_zero_dims_is_torchs(dtype: str, other: object) -> None:
    builder = Builder({}, {})

    def pair(spec: object) -> tuple[object, object]:
        if not isinstance(spec, tuple):
            return spec, spec
        kind, shape = spec
        return Tensor("t", shape, kind, builder), torch.zeros(shape, dtype=getattr(torch, kind))

    for shape in ((2,), ()):
        ours, theirs = pair((dtype, shape))
        mine, yours = pair(other)
        assert names.promoted_dtype(ours, mine) == str(torch.result_type(theirs, yours)).removeprefix("torch.")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("to", "shape"),
    [
        ((4, 6), (2, 2, 6)),
        ((24,), (2, 3, 4)),
        ((2, 3, 4), (24,)),
        ((6, 4), (2, 3, 4)),
        ((8, 3), (4, 6)),
        ((1, 6, 1), (2, 3)),
        ((), (1, 1)),
        ((5, 1), (5,)),
    ],
)
def test_reshaped_finds_the_same_element(to: tuple[int, ...], shape: tuple[int, ...]) -> None:
    values = torch.arange(torch.Size(shape).numel()).reshape(shape)
    i = coordinates(to)
    found = names.reshaped(i, to, shape)
    for point in itertools.product(*map(range, to)):
        at = {v.var: k for v, k in zip(i, point, strict=True) if v.var is not None}
        place = tuple(evaluate(expr(e), at) for e in found)
        assert values[place] == values.reshape(to)[point]


def test_reshaping_keeps_untouched_dimensions_as_they_are() -> None:
    i = coordinates((2, 8, 12, 32))
    assert names.reshaped(i, (2, 8, 12, 32), (2, 8, 384))[:2] == list(i[:2])
    s0 = sym("s0")
    j = coordinates((s0, 384))
    assert names.reshaped(j, (s0, 384), (s0, 12, 32)) == [j[0], j[1] // 32, j[1] % 32]


def test_reshaping_takes_sizes_for_equal_that_only_guards_compare() -> None:
    s0, s1, s2 = map(sym, ("s0", "s1", "s2"))
    i = coordinates((s0, 3))
    assert names.reshaped(i, (s0, 3), (s1, s2, 3)) == [i[0] // s2, i[0] % s2, i[1]]
    with pytest.raises(UnsupportedError, match="do not hold as many"):
        names.reshaped(coordinates((2, 3)), (2, 3), (2, 4))


def test_a_decision_about_an_unknown_size_is_refused() -> None:
    s0, s1 = sym("s0"), sym("s1")
    assert names.lt(s0, s0 + 1)
    assert not names.lt(s0 + 1, s0)
    with pytest.raises(UnsupportedError, match="not known before the sizes are"):
        names.lt(s0, s1)
    with pytest.raises(UnsupportedError, match="not known to be equal"):
        names.broadcast([s0], [s1])
    assert names.broadcast([s0, 1], [3]) == [s0, 3]


@pytest.mark.parametrize(
    ("start", "end", "n"), [(0, 2**63 - 1, 5), (-2, None, 5), (3, 2, 5), (-9, 9, 5), (None, -1, 5), (6, 9, 5)]
)
def test_slices_are_pythons(start: int | None, end: int | None, n: int) -> None:
    first, last = names.sliced(start, end, n)
    assert list(range(n))[start:end] == list(range(first, last))


@pytest.mark.parametrize(
    ("start", "end", "step"), [(0, 7, 2), (2, 11, 3), (9, 0, -2), (0.5, 2.0, 0.25), (0, 5.5, 1), (3, 3, 1), (5, 2, 1)]
)
def test_steps_count_like_arange(start: float, end: float, step: float) -> None:
    expected = len(torch.arange(start, end, step)) if (end - start) * step >= 0 else 0
    assert names.steps(start, end, step) == expected
