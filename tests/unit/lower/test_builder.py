"""The builder: compute types and roundings, reductions of one element, guarded reads, what is undone when a lowering fails."""

import pytest

from opforge.errors import UnsupportedError
from opforge.runtime.ir.nodes import Nest
from opforge.runtime.lower.language import scalar_ops as s
from opforge.runtime.lower.language.builder import Builder
from opforge.runtime.lower.language.names import inside, value_of, within
from opforge.runtime.lower.language.tensor import Tensor


def builder() -> Builder:
    b = Builder({}, {})
    b.prefix = "y"
    return b


def tensor(b: Builder, shape: tuple[int, ...], dtype: str, name: str = "x") -> Tensor:
    return Tensor(name, shape, dtype, b)


def nest(b: Builder, k: int = -1) -> Nest:
    item = b.items[k]
    assert isinstance(item, Nest)
    return item


def test_half_precision_computes_in_float32_and_rounds_once() -> None:
    b = builder()
    p = b.pointwise((tensor(b, (4,), "bfloat16"), 0.1))
    x, y = p.operands
    assert p.common == "bfloat16"
    assert x.dtype == y.dtype == "float32"
    result = p.result(x * y + x)
    assert result.dtype == "bfloat16"
    assert nest(b).body.op == "to_dtype"
    assert nest(b).body.args[0].dtype == "float32"


def test_a_comparison_sees_a_number_as_the_tensor_would_hold_it() -> None:
    b = builder()
    arithmetic = b.pointwise((tensor(b, (4,), "bfloat16"), 0.1)).operands[1]
    comparison = b.pointwise((tensor(b, (4,), "bfloat16"), 0.1), promote="bool").operands[1]
    assert arithmetic.attr == pytest.approx(0.1, rel=1e-7)
    assert comparison.attr == 0.10009765625


def test_operands_broadcast_and_plain_ones_keep_their_dtype() -> None:
    b = builder()
    p = b.pointwise(
        (tensor(b, (3, 1), "float32"), tensor(b, (4,), "float64", "z")), plain=(tensor(b, (), "bool", "m"),)
    )
    x, z, m = p.operands
    assert (x.dtype, z.dtype, m.dtype) == ("float64", "float64", "bool")
    assert p.result(s.where(m, x, z)).shape == (3, 4)
    assert [n.attr.buffer for n in nest(b).body.loads()] == ["m", "x", "z"]


def test_a_half_precision_sum_accumulates_in_float32_and_has_a_rounding_nest() -> None:
    b = builder()
    x = tensor(b, (4, 8), "float16")
    i, r = b.coords([4]), b.rcoords([8])
    y = b.reduce("sum", [4], r, b.at(x, [i[0], r[0]]))
    assert y.dtype == "float16"
    assert [nest(b, k).dtype for k in (0, 1)] == ["float32", "float16"]
    assert nest(b, 0).name == "y_acc"
    assert y.name == "y"


def test_a_reduction_over_one_element_is_no_loop() -> None:
    b = builder()
    x = tensor(b, (4, 1), "float32")
    i, r = b.coords([4]), b.rcoords([1])
    b.reduce("max", [4], r, b.at(x, [i[0], r[0]]))
    assert nest(b).reduce is None
    assert nest(b).body.op == "load"
    assert b.reduce("argmax", [4], r, b.at(x, [i[0], r[0]])).dtype == "int64"
    assert nest(b).body.op == "const"


def test_conditions_that_always_hold_cost_nothing() -> None:
    b = builder()
    i = b.coords([4])
    assert within(i[0], 0, 4) is True
    assert inside([i[0]], [9]) is True
    shifted = within(i[0] - 1, 0, 9)
    assert shifted.op == "ge"
    assert b.guarded(True, value_of(i[0]), 0).op == "index"


def test_a_guarded_read_touches_nothing_where_the_condition_fails() -> None:
    b = builder()
    i = b.coords([6])
    x = tensor(b, (4,), "float32")
    value = b.guarded(inside([i[0] - 1], [4]), b.at(x, [i[0] - 1]), 0)
    (read,) = value.loads()
    assert value.op == "where"
    assert read.args
    assert read.args[0].dtype == "bool"


def test_an_index_wraps_unless_it_cannot_be_negative() -> None:
    b = builder()
    k = b.at(tensor(b, (4,), "int32"), b.coords([4]))
    assert (
        b.index_of(k, 7).text
        == "at(bounded(where(lt(to_dtype(x[i0]):int64, 0:int64), add(to_dtype(x[i0]):int64, 7:int64), to_dtype(x[i0]):int64), "
        "7:int64, True:bool), 0, 6)"
    )
    assert b.place_of(k, 7).text == "at(bounded(to_dtype(x[i0]):int64, 7:int64, True:bool), 0, 6)"
    assert b.index_of(value_of(b.coords([4])[0]), 7) is b.coords([4])[0]


def test_an_empty_result_computes_nothing() -> None:
    b = builder()
    b.define([0, 4], b.at(tensor(b, (5, 4), "float32"), b.coords([5, 4])))
    assert nest(b).body.op == "const"


def test_rewinding_frees_the_names() -> None:
    b = builder()
    mark = b.mark()
    b.define([4], 1.0)
    b.rewind(mark)
    assert not b.items
    assert b.define([4], 1.0).name == "y"
    assert b.define([4], 2.0).name == "y_2"


def test_refusals_say_why() -> None:
    b = builder()
    with pytest.raises(UnsupportedError, match="not native unless is_float"):
        b.native_if(False, "is_float(dtype(self))")
    with pytest.raises(UnsupportedError, match="no operator entry has the symbol"):
        tensor(b, (4,), "float32") + 1
    with pytest.raises(UnsupportedError, match="has no lowering of its own here"):
        b.call("aten.sort.default", tensor(b, (4,), "float32"))
