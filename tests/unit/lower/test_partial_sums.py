"""Long reductions in two steps: the same values, valid plans, work for a whole GPU; and what stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opforge.runtime.codegen.triton_unit import render_triton
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.ir.interpret import interpret
from opforge.runtime.ir.nodes import Nest, Program
from opforge.runtime.ir.text import dump, parse
from opforge.runtime.ir.verify import verify
from opforge.runtime.lower import scalar_ops as s
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.partial_sums import LIGHT, SMALL, partial_reductions, perhaps_costly
from tests.support.loops import plan_of, pointwise, program_of, reduce, softmax

PROGRAMS = 528

CASES: dict[str, tuple[tuple[int, ...], Any]] = {
    "all": ((1 << 18,), lambda b, x: reduce(b, "sum", x, 0)),
    "all of two dimensions": ((512, 600), lambda b, x: reduce(b, "sum", pointwise(b, s.exp, x), (0, 1))),
    "columns": ((8192, 24), lambda b, x: reduce(b, "max", x, 0, True)),
    "few rows": ((3, 1 << 16), lambda b, x: reduce(b, "prod", x, 1)),
    "softmax": ((3, 1 << 16), lambda b, x: softmax(b, x, 1)),
}


def parts(program: Program) -> list[Nest]:
    return [i for i in program.items if isinstance(i, Nest) and i.name.endswith("_parts")]


@pytest.mark.parametrize("name", CASES)
def test_same_values(name: str) -> None:
    shape, build = CASES[name]
    torch.manual_seed(0)
    x = torch.rand(shape) if name != "few rows" else 1 + torch.rand(shape) * 1e-5
    program = program_of(build, [x])
    cut = partial_reductions(program, PROGRAMS)
    verify(cut)
    assert dump(parse(dump(cut))) == dump(cut)
    assert parts(cut)
    for got, want in zip(interpret(cut, [x], exact=True), interpret(program, [x], exact=True), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    unit = render_triton(plan_of(cut))  # checks the plan
    first = next(iter(unit.programs.values()))
    assert isinstance(first, int)
    assert first >= 16


def test_what_stays() -> None:
    def kept(build: Any, x: torch.Tensor) -> bool:
        program = program_of(build, [x])
        return partial_reductions(program, PROGRAMS) is program

    assert kept(lambda b, x: reduce(b, "sum", x, 1), torch.rand(4096, 64))  # rows enough
    assert kept(lambda b, x: reduce(b, "sum", x, 0), torch.rand(1000))  # nothing to gain
    assert kept(lambda b, x: reduce(b, "argmax", x, 0), torch.rand(1 << 18))  # positions of parts do not combine
    assert kept(lambda b, x: reduce(b, "sum", x, 0), torch.rand(262147))  # a prime: no equal parts


def test_costly_elements_are_cut_sooner() -> None:
    n = SMALL // 4
    x = torch.rand(n)
    program = program_of(lambda b, x: reduce(b, "sum", pointwise(b, s.exp, x), 0), [x])
    (name,) = (i.name for i in program.items if isinstance(i, Nest) and i.reduce is not None)
    for cost, cut in ((0, False), (LIGHT, False), (4 * LIGHT, False), (4 * LIGHT + 1, True)):
        found = partial_reductions(program, PROGRAMS, costs={name: cost})
        assert (found is not program) == cut == bool(parts(found))
    verify(found)
    (got,), (want,) = interpret(found, [x], exact=True), interpret(program, [x], exact=True)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_what_is_read_may_be_costly() -> None:
    """A reduction of a value that is computed point by point: the sum of both, which is asked before it is known what is computed where."""

    def asked(n: int, cost: float) -> bool:
        program = program_of(lambda b, x: reduce(b, "sum", pointwise(b, s.exp, x), 0), [torch.rand(n)])
        return perhaps_costly(program, PROGRAMS, lambda _: cost)

    assert asked(SMALL // 4, 2 * LIGHT + 1)
    assert not asked(SMALL // 4, 2 * LIGHT)
    assert not asked(SMALL + 1, 2 * LIGHT + 1)  # long in any case
    rows = program_of(lambda b, x: reduce(b, "sum", x, 1), [torch.rand(PROGRAMS, 64)])
    assert not perhaps_costly(rows, PROGRAMS, lambda _: 1e9)


def test_a_spread_is_made_of_parts_about_their_own_means() -> None:
    def variance(x: torch.Tensor) -> torch.Tensor:
        apart = x - x.mean(0, True)
        return (apart * apart).sum(0, True)

    x = 100 + torch.rand(8192, 24)
    program = lower(trace(variance, [x]).graph).program
    cut = partial_reductions(program, PROGRAMS)
    verify(cut)
    assert [p.reduce for p in parts(cut)] == ["sum", "sum"]
    assert any(ld.attr.buffer == parts(cut)[0].name for ld in parts(cut)[1].body.loads())
    (got,), (want,) = interpret(cut, [x], exact=True), interpret(program, [x], exact=True)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
    plan = plan_of(cut)
    assert sum(program.inputs[0].name in k.reads for k in plan.kernels()) == 1


def _statistics(x: torch.Tensor, order: str) -> tuple[torch.Tensor, ...]:
    """Mean, squares and the sum of what is apart from the mean, as the norms of `specs/ops/norm.yaml` ask for them."""
    near = x.mean(0, True)
    made = {
        "q": lambda: ((x - near) * (x - near)).sum(0, True),
        "r": lambda: (x - near).sum(0, True),
    }
    return near, *(made[k]() for k in order)


@pytest.mark.parametrize("order", ["qr", "rq", "r", "rr", "qq"])
def test_statistics_of_a_norm_read_their_data_once(order: str) -> None:
    """Two equal differences, which a spec writes as `(x - near) * (x - near)`, were not seen to be a square, and the sum of distances was made
    from all of the data: batch norms in training read it three times."""
    torch.manual_seed(0)
    x = 100 + torch.rand(8192, 24)
    program = lower(trace(lambda x: _statistics(x, order), [x]).graph).program
    cut = partial_reductions(program, PROGRAMS)
    verify(cut)
    assert dump(parse(dump(cut))) == dump(cut)
    for got, want in zip(interpret(cut, [x], exact=True), interpret(program, [x], exact=True), strict=True):
        # In exact sums nothing is left of the distances: they are judged by what they are sums of.
        torch.testing.assert_close(got, want, rtol=1e-9, atol=8192 * 1e-13)
    plan = plan_of(cut)
    assert sum(program.inputs[0].name in k.reads for k in plan.kernels()) == 1


@pytest.mark.parametrize("order", ["qr", "rq"])
def test_statistics_of_constant_columns(order: str) -> None:
    """What is apart from a rounded mean is all the same: its square is its mean's square, and nothing is left of the variance."""
    x = torch.tensor([0.1, 1000.1, -3e-5]).repeat(96 * 1024, 1)
    program = lower(trace(lambda x: _statistics(x, order), [x]).graph).program
    found = interpret(partial_reductions(program, PROGRAMS), [x])
    near, q, r = found[0], found[1 + order.index("q")], found[1 + order.index("r")]
    n = x.shape[0]
    assert ((near.double() + r.double() / n - x[0].double()).abs() <= x[0].double().abs() * 2**-40).all()
    left = (q.double() / n - (r.double() / n) ** 2).abs()
    assert (left <= x[0].double() ** 2 * 2**-62).all(), left
