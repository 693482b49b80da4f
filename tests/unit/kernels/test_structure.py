"""Kernels of equal structure are one piece of code: names do not count, everything else does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opforge.runtime.ir.nodes import const
from opforge.runtime.kernels.plan import Plan
from opforge.runtime.kernels.structure import Structure, structure
from opforge.runtime.lower.language import scalar_ops as s
from tests.support.loops import agree, permute, pointwise, reduce, run, softmax


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def structures(plan: Plan) -> list[Structure | None]:
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


def test_rows_of_a_buffer_are_one_function_at_several_places() -> None:
    """Each step of an unrolled loop reads a row of its own, and writes one: the C++ compiler sees the code once."""

    def rows(b: Any, x: Any, w: Any) -> Any:
        found = []
        for k in range(4):
            i = b.coords((x.shape[1],))
            row = b.define((x.shape[1],), b.at(x, [k, i[0]]))
            found.append(softmax(b, pointwise(b, s.mul, row, w), 0))
        return tuple(found)

    ran = run(rows, [rand(4, 40), rand(40)], fusion=False)
    agree(ran)
    found = [f for f in structures(ran.plan) if f is not None]
    moved = [f for f in set(found) if any(f.starts)]
    assert {f.starts[0] for f in moved} == {40, 80, 120}
    assert len({f.key for f in found}) < len(set(found))
    assert "+ (40)" in ran.source


def test_two_rows_of_a_buffer_in_one_kernel_stay_apart() -> None:
    def both(b: Any, x: Any, first: int, second: int) -> Any:
        i = b.coords((x.shape[1],))
        return b.define((x.shape[1],), s.sub(b.at(x, [first, i[0]]), b.at(x, [second, i[0]])))

    ran = run(lambda b, x: (both(b, x, 0, 1), both(b, x, 2, 1), both(b, x, 1, 2)), [rand(4, 40)], fusion=False)
    agree(ran)
    assert len({f.key for f in structures(ran.plan) if f is not None}) == len(list(ran.plan.kernels()))
