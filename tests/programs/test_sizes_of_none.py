"""Graphs of symbolic sizes that become 0 or 1: what is decided about them is not asked again, and plans hold for no elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from opforge.runtime.graph import predicates


def _every_second(t: Tensor, step: int) -> Tensor:
    return t[2::step].flatten() + 1


def _by_a_quotient(t: Tensor, rows: int) -> Tensor:
    flat = t.chunk(3, 0)[0].t().flatten() + 1
    n = flat.numel()
    return flat[: n // rows * rows].reshape(rows, -1).sum(-1)


@pytest.mark.parametrize(
    ("program", "calls"),
    [
        (_every_second, [((7, 9), 4), ((1, 5), 4), ((2, 5), 3), ((9, 2), 1)]),
        (_by_a_quotient, [((7, 9), 4), ((6, 1), 4), ((2, 5), 3), ((4, 3), 2)]),
    ],
)
def test_one_program_over_sizes(
    program: Callable[[Tensor, int], Tensor], calls: list[tuple[tuple[int, int], int]]
) -> None:
    """A rewrite that asked whether two sizes are equal made torch narrow a range to nothing."""
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="opforge", dynamic=True, options={"debug.verify": True, "strict": True})
    for shape, number in calls:
        t = torch.randn(shape)
        torch.testing.assert_close(compiled(t, number), program(t, number))


def test_a_predicate_adds_no_guard() -> None:
    """Sizes that are equal in the example inputs only are not the same."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    symbolic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    a, b = (mode.from_tensor(torch.empty(4), symbolic_context=symbolic, source=ConstantSource(n)) for n in "ab")
    before = len(environment.guards)
    assert not predicates.same_type(a, b)
    assert predicates.same_type(a, a.clone())
    assert len(environment.guards) == before
