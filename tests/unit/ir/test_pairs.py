"""Complex numbers as pairs of reals: what is the same for both parts is one expression, and buffers know how the outside sees them."""

import pytest

from opforge.runtime.ir.nodes import Buffer, Node, const, coordinates, index_node
from opforge.runtime.ir.pairs import element, inside, outside, pair, part, parts
from opforge.runtime.ir.text import dump
from opforge.runtime.lower.language import scalar_ops as s
from tests.support.ir_text import parse

I, C = coordinates((3, 2))


def x(name: str = "x", dtype: str = "complex64") -> Node:
    return element(name, [I], dtype)


def test_an_element_is_two_loads_beside_each_other() -> None:
    assert x().dtype == "complex64"
    assert [n.text for n in parts(x())] == ["x[i0, 0]", "x[i0, 1]"]
    assert [n.dtype for n in parts(x(dtype="complex128"))] == ["float64"] * 2


def test_a_sum_is_one_expression_for_both_parts() -> None:
    assert part(s.add(x("x"), x("y")), C).text == "add(x[i0, i1], y[i0, i1])"


def test_a_constant_is_chosen_by_the_part() -> None:
    text = part(s.sub(x(), s.constant(2 + 3j, "complex64")), C).text
    assert text == "sub(x[i0, i1], where(eq([i1], 0:int64), 2.0:float32, 3.0:float32))"


def test_parts_that_are_computed_otherwise_are_chosen_at_the_end() -> None:
    product = part(s.mul(x("x"), x("y")), C)
    assert product.op == "where"
    assert [n.op for n in product.args] == ["eq", "sub", "add"]


def test_a_shared_part_is_itself() -> None:
    value = index_node(I)
    assert part(pair(s.to_dtype(value, "float32"), s.to_dtype(value, "float32")), C).op == "to_dtype"


def test_other_buffers_and_other_masks_are_not_joined() -> None:
    a, b = parts(x("x"))[0], parts(x("y"))[1]
    assert part(pair(a, b), C).op == "where"


def test_a_deep_expression() -> None:
    value = x()
    for _ in range(3000):
        value = s.add(value, x("y"))
    assert part(value, C).op == "add"


def test_what_is_real_has_no_imaginary_part() -> None:
    assert parts(const(2.0, "float64"))[1].attr == 0.0


@pytest.mark.parametrize("stride", [(2, 6), (0, 1)])
def test_a_buffer_seen_from_both_sides(stride: tuple[int, int]) -> None:
    b = Buffer("x", (3, 2), "complex64", stride, 5)
    held = inside(b)
    assert (held.shape, held.dtype, held.stride) == ((3, 2, 2), "float32", (2 * stride[0], 2 * stride[1], 1))
    assert (held.offset, held.paired) == (10, True)
    assert outside(held) == b


def test_what_has_no_strides_or_is_real_stays() -> None:
    for b in (Buffer("x", (3,), "complex64"), Buffer("x", (3,), "float32", (1,)), Buffer("x", (3,), "complex32", (1,))):
        assert inside(b) is b
        assert outside(b) is b


def test_programs_have_a_text() -> None:
    text = """program
input x: float32[3, 2] stride [2, 1] paired
extern y: float32[3, 2] stride [2, 1] paired = aten.exp.default(&x stride [2, 1] paired)
output y stride [2, 1] paired
output x paired
"""
    assert dump(parse(text)) == text
