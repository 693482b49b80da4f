"""Building scalar expressions: dtypes, constants, indices, and folding only where it is exact."""

import math

import pytest

from opforge.errors import UnsupportedError
from opforge.runtime.ir.index import sym, var
from opforge.runtime.ir.nodes import Node, index_node, load
from opforge.runtime.lower.language import scalar_ops as s
from opforge.runtime.lower.language.scalar_fold import rounded, wrapped

I0 = var("i0", 4)


def x(dtype: str = "float32") -> Node:
    return load("x", [I0], dtype)


def test_numbers_take_the_dtype_of_the_elem() -> None:
    assert s.add(x("float64"), 1).args[1].dtype == "float64"
    assert (x("int32") + 1).dtype == "int32"
    assert (x("bfloat16") * 0.5).dtype == "bfloat16"


def test_float_number_beside_integers_makes_float32() -> None:
    assert (x("int32") * 1.5).dtype == "float32"
    assert s.div(x("int64"), 2).dtype == "float32"


def test_elems_of_different_dtypes_are_promoted() -> None:
    assert s.add(x("float32"), load("y", [I0], "float64")).dtype == "float64"
    assert s.maximum(x("uint8"), load("y", [I0], "int8")).dtype == "int16"


def test_an_index_counts_as_int64_and_follows_a_float() -> None:
    assert s.lt(index_node(I0), sym("s0")).dtype == "bool"
    assert (x() * I0).dtype == "float32"


def test_comparison_gives_bool_and_where_the_dtype_of_its_branches() -> None:
    c = x() < 0
    assert c.dtype == "bool"
    assert s.where(c, x("float64"), 0).dtype == "float64"


def test_python_numbers_alone_stay_python_numbers() -> None:
    assert s.exp(1) == math.e
    assert s.where(True, 2, 3) == 2


def test_identities_hold_for_signed_zeros() -> None:
    assert x() * 1 is x()
    assert x() - 0 is x()
    assert x() + -0.0 is x()
    assert x() / 1 is x()
    assert (x() + 0).op == "add"  # -0.0 + 0.0 is +0.0
    assert (x() - -0.0).op == "sub"  # -0.0 - -0.0 is +0.0
    assert (x() * 0).op == "mul"  # NaN, infinity
    assert x("int32") + 0 is x("int32")


def test_folding_rounds_to_the_dtype_and_wraps_integers() -> None:
    tenth = s.constant(0.1, "float32")
    assert tenth.attr == rounded(0.1, "float32") != 0.1
    assert s.add(tenth, s.constant(0.2, "float32")).attr == rounded(
        rounded(0.1, "float32") + rounded(0.2, "float32"), "float32"
    )
    assert s.add(s.constant(127, "int8"), s.constant(1, "int8")).attr == -128
    assert wrapped(256, "uint8") == 0


def test_zeros_of_either_sign_are_not_folded_by_extremes() -> None:
    assert s.maximum(s.constant(0.0, "float32"), s.constant(-0.0, "float32")).op == "maximum"


@pytest.mark.parametrize(
    ("value", "bits"), [(1.00390625, 1.0), (1.01171875, 1.015625), (3.4e38, float("inf")), (1.0, 1.0)]
)
def test_bfloat16_rounds_to_even(value: float, bits: float) -> None:
    assert rounded(value, "bfloat16") == bits


def test_conversions_fold_only_what_they_cannot_change() -> None:
    narrow = x("bfloat16")
    assert s.to_dtype(s.to_dtype(narrow, "float32"), "bfloat16") is narrow
    assert s.to_dtype(s.to_dtype(x(), "bfloat16"), "float32").op == "to_dtype"
    assert s.to_dtype(s.to_dtype(x("int32"), "float32"), "int32").op == "to_dtype"


def test_what_a_dtype_cannot_hold_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="out of range for int8"):
        s.constant(300, "int8")
    with pytest.raises(UnsupportedError, match="not a number of int32"):
        s.constant(math.inf, "int32")
    with pytest.raises(UnsupportedError, match="no loop code"):
        s.to_dtype(x(), "complex32")
    with pytest.raises(UnsupportedError, match="sub of bool"):
        s.sub(x("bool"), x("bool"))


def test_unknown_scalar_names_the_spec() -> None:
    with pytest.raises(AttributeError, match=r"specs/scalars.yaml has no scalar 'frobnicate'"):
        s.frobnicate  # noqa: B018
