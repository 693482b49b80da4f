"""Kernels of equal structure are one piece of code: names do not count, everything else does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opforge.runtime.codegen.structure import structure
from opforge.runtime.ir.nodes import const
from opforge.runtime.lower import scalar_ops as s
from opforge.runtime.schedule.plan import Plan
from tests.support.loops import permute, pointwise, reduce, run, softmax


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def structures(plan: Plan) -> list[Any]:
    return [structure(k, plan.layouts) for k in plan.kernels()]


def test_layers_have_one_structure() -> None:
    def layers(b: Any, x: Any) -> Any:
        for _ in range(4):
            x = softmax(b, x, 0)
            x = softmax(b, x, 1)
        return x

    ran = run(layers, [rand(20, 30)])
    found = structures(ran.plan)
    assert len(found) >= 4
    assert len(set(found)) < len(found)
    assert len(set(found)) == ran.source.count('extern "C"')


def gathered(b: Any, x: Any, i: Any) -> Any:
    at = b.coords(i.shape)
    return b.define(i.shape, b.at(x, [b.index_of(b.at(i, at), x.shape[0])]))


DIFFERENT = {
    "constants": (lambda b, x: (pointwise(b, lambda a: s.add(a, 1.0), x), pointwise(b, lambda a: s.add(a, 2.0), x))),
    "signed zeros": (
        lambda b, x: tuple(
            pointwise(b, lambda a, z=z: s.where(s.lt(a, 0.0), const(z, "float32"), a), x) for z in (0.0, -0.0)
        )
    ),
    "operations": (lambda b, x: (pointwise(b, s.exp, x), pointwise(b, s.tanh, x))),
    "order of axes": (lambda b, x: (reduce(b, "sum", x, 0), reduce(b, "sum", x, 1))),
    "reductions": (lambda b, x: (reduce(b, "sum", x, 1), reduce(b, "max", x, 1))),
    "layouts": (lambda b, x: (reduce(b, "sum", x, 1), reduce(b, "sum", permute(b, x, (1, 0)), 1))),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_has_another_structure(name: str) -> None:
    ran = run(DIFFERENT[name], [rand(12, 12)], fusion=False)
    found = structures(ran.plan)
    assert len(found) == len(set(found)) >= 2


def test_positions_from_data_count() -> None:
    ran = run(gathered, [rand(9), torch.tensor([3, 1, 8])])
    again = run(gathered, [rand(9), torch.tensor([3, 1, 8])])
    other = run(gathered, [rand(8), torch.tensor([3, 1, 7])])
    (one,), (same,), (different,) = structures(ran.plan), structures(again.plan), structures(other.plan)
    assert one == same != different
