"""Bounds of scalar expressions, against the values that they take."""

from __future__ import annotations

import pytest
import torch

from opforge.runtime.ir.nodes import Buffer, Node, Output, Program, index_node, load
from opforge.runtime.ir.ranges import value_range
from opforge.runtime.lower.language import scalar_ops as s
from opforge.runtime.lower.language.builder import Builder
from tests.support.ir_interpreter import interpret

I0 = index_node(Builder({}, {}).coords([9])[0])
BYTE = s.to_dtype(load("x", (), "uint8"), "int64")
ANY = load("y", (), "int64")
FLOAT = s.to_dtype(I0, "float32")

CASES = {
    "coordinate": (I0, (0, 8)),
    "byte": (BYTE, (0, 255)),
    "any": (ANY, (None, None)),
    "sum": (s.sub(s.mul(I0, 3), 5), (-5, 19)),
    "clamp": (s.minimum(s.maximum(ANY, 0), 6), (0, 6)),
    "lower clamp": (s.maximum(ANY, 2), (2, None)),
    "remainder": (s.remainder(ANY, s.constant(7, "int64")), (0, 6)),
    "reflection": (s.sub(8, s.abs(s.sub(8, s.abs(s.sub(I0, 2))))), (0, 6)),
    "either": (s.where(s.lt(ANY, 0), 3, I0), (0, 8)),
    "wrapped": (s.mul(ANY, 2), (None, None)),
    "narrow": (s.to_dtype(s.add(s.to_dtype(BYTE, "uint8"), s.constant(200, "uint8")), "int64"), (0, 255)),
    "nearest": (s.minimum(s.to_dtype(s.floor(s.mul(FLOAT, 0.3)), "int64"), 2), (0, 2)),
    "endless": (s.to_dtype(s.floor(s.mul(load("z", (), "float32"), 0.0)), "int64"), (None, None)),
    "large": (s.to_dtype(s.mul(FLOAT, 1e6), "int64"), (None, None)),
}


@pytest.mark.parametrize("name", CASES)
def test_bounds(name: str) -> None:
    node, expected = CASES[name]
    assert value_range(node) == expected


@pytest.mark.parametrize("name", CASES)
def test_values_keep_to_their_bounds(name: str) -> None:
    node: Node = CASES[name][0]
    lo, hi = value_range(node)
    b = Builder({}, {})
    out = b.define([9], node)
    inputs = (Buffer("x", (), "uint8"), Buffer("y", (), "int64"), Buffer("z", (), "float32"))
    program = Program(inputs, b.items, (Output(out.name),))
    for x, y, z in ((0, 0, 0.0), (255, -(2**63), float("inf")), (7, 2**63 - 1, float("nan")), (100, -1, -3.5)):
        (values,) = interpret(
            program, [torch.tensor(x, dtype=torch.uint8), torch.tensor(y), torch.tensor(z, dtype=torch.float32)]
        )
        assert all((lo is None or lo <= v) and (hi is None or v <= hi) for v in values.tolist())
