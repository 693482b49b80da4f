"""Python numbers that change from call to call, in the loop program."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from opforge.errors import UnsupportedError
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.ir.nodes import const
from opforge.runtime.ir.text import dump
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.language.number import Number
from opforge.runtime.lower.numbers import Numbers


def lowered(device: str) -> str:
    """A program with a number that comes as a tensor of the processor's, as Dynamo passes it."""

    def program(x: Tensor, t: Tensor) -> Tensor:
        a = t.item()
        return x * a + x.new_full((8,), a * 2)

    with FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=True)):
        given = [torch.empty(8, device=device), torch.empty((), dtype=torch.float64)]
    return dump(lower(trace(program, given, training=False).graph, device=device).program)


def test_kernels_read_it_where_it_is() -> None:
    text = lowered("cpu")
    assert "extern" not in text
    assert "mul(arg0[i0], to_dtype(arg1[]):float32)" in text
    assert "to_dtype(mul(2.0:float64, arg1[])):float32" in text


def test_kernels_of_a_gpu_read_it_from_its_memory() -> None:
    text = lowered("cuda")
    assert "learn number0_signed = result 0" in text
    assert 'aten.full.default([], {number0_signed}, dtype=torch.float64, device=torch.device("cuda"))' in text


def test_nothing_is_decided_by_it() -> None:
    a = Number(const(2.0, "float64"))
    for decide in (bool, float, int, lambda x: x == 2.0, lambda x: x < 3, lambda x: max(x, 1.0)):
        with pytest.raises(UnsupportedError, match="decides"):
            decide(a)


def test_arithmetic_is_in_double() -> None:
    a = Number(const(2.0, "float64"))
    for found in (a + 1, 1 - a, a * a, 3 / a, -a, 2**a):
        assert isinstance(found, Number)
        assert found.node.dtype == "float64"


def test_kernels_compute_what_python_computes_without_an_error() -> None:
    """Not a quotient by what may be 0, nor a power."""
    a = Number(const(2.0, "float64"))
    with FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=True)):
        x: Any = torch.empty((), dtype=torch.float64).item()
        assert Numbers.computed(operator.mul, (2.0, a), 2.0 * x) is not None
        assert Numbers.computed(operator.truediv, (a, 2.0), x / 2.0) is not None
        assert Numbers.computed(operator.truediv, (2.0, a), 2.0 / x) is None
        assert Numbers.computed(operator.truediv, (a, 0.0), x) is None
        assert Numbers.computed(operator.pow, (a, 2.0), x**2.0) is None
        assert Numbers.computed(operator.floordiv, (2.0, a), x) is None
