"""Long reductions in two steps: the same values, valid plans, work for a whole GPU; and what stays as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from opforge.runtime.dispatch.trace import trace
from opforge.runtime.ir.nodes import Nest, Program
from opforge.runtime.ir.text import dump
from opforge.runtime.ir.verify import verify
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.language import scalar_ops as s
from opforge.runtime.lower.split.partial_sums import costly_reductions, partial_reductions, read_again
from opforge.runtime.render.triton_unit import render_triton
from tests.support.gpu_plan import planned
from tests.support.ir_interpreter import interpret
from tests.support.ir_text import parse
from tests.support.loops import plan_of, pointwise, program_of, reduce, softmax
from tests.support.machines import H200, with_split

GPU = replace(H200, num_sms=66)
SPLIT = GPU.costs.split

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
    cut = partial_reductions(program, GPU)
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
        return partial_reductions(program, GPU) is program

    assert kept(lambda b, x: reduce(b, "sum", x, 1), torch.rand(4096, 64))  # rows enough
    assert kept(lambda b, x: reduce(b, "sum", x, 0), torch.rand(1000))  # nothing to gain
    assert kept(lambda b, x: reduce(b, "argmax", x, 0), torch.rand(1 << 18))  # positions of parts do not combine
    assert kept(lambda b, x: reduce(b, "sum", x, 0), torch.rand(262147))  # a prime: no equal parts


def made_costly(build: Any, *inputs: torch.Tensor, cost: float) -> tuple[Program, list[str]]:
    """The program, and its reductions that are costly where each operation costs so much, and a load 1."""
    program = program_of(build, list(inputs))
    return program, sorted(costly_reductions(program, SPLIT, lambda _: cost))


def exps(b: Any, x: Any) -> Any:
    return pointwise(b, s.exp, x)


def test_costly_elements_are_cut_sooner() -> None:
    """What is computed point by point for a sum is computed in its kernel: its cost counts."""
    n = SPLIT.values // 4
    x = torch.rand(n)
    for cost, cut in ((SPLIT.cost, False), (4 * SPLIT.cost - 2, False), (4 * SPLIT.cost - 1, True)):  # and two loads
        program, found = made_costly(lambda b, x: reduce(b, "sum", exps(b, x), 0), x, cost=cost)
        made = partial_reductions(program, GPU, costly=found)
        assert bool(found) == bool(parts(made)) == cut
    verify(made)
    (got,), (want,) = interpret(made, [x], exact=True), interpret(program, [x], exact=True)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("why", "shape", "build"),
    [
        ("long in any case", (SPLIT.values + 1,), lambda b, x: reduce(b, "sum", exps(b, x), 0)),
        ("no two parts", (4095,), lambda b, x: reduce(b, "sum", exps(b, x), 0)),
        ("rows", (4, 20000), lambda b, x: reduce(b, "sum", exps(b, x), 1)),
        ("read again", (40000,), lambda b, x: softmax(b, exps(b, x), 0)),
        (
            "two that share a pass",
            (40000,),
            lambda b, x: (reduce(b, "sum", y := exps(b, x), 0), reduce(b, "max", y, 0)),
        ),
        (
            "a position beside it",
            (40000,),
            lambda b, x: (reduce(b, "max", y := exps(b, x), 0), reduce(b, "argmax", y, 0)),
        ),
    ],
)
def test_costly_elements_that_stay(why: str, shape: tuple[int, ...], build: Any) -> None:
    assert made_costly(build, torch.rand(shape), cost=1e9)[1] == [], why


def test_the_limit_is_the_machines() -> None:
    """Benchmarks change it: `benchmarks/short_sums.py`."""
    program = program_of(lambda b, x: softmax(b, x, 0), [torch.rand(40000)])
    assert not read_again(program, GPU)
    assert read_again(program, with_split(GPU, values=0))


def test_costly_parts_are_no_rows_of_a_few_elements() -> None:
    x = torch.rand(16384, 2)
    program, found = made_costly(lambda b, x: reduce(b, "sum", exps(b, x), (0, 1)), x, cost=1e3)
    (first,) = parts(partial_reductions(program, GPU, costly=found))
    assert first.shape == (16,)


def test_a_spread_is_made_of_parts_about_their_own_means() -> None:
    def variance(x: torch.Tensor) -> torch.Tensor:
        apart = x - x.mean(0, True)
        return (apart * apart).sum(0, True)

    x = 100 + torch.rand(8192, 24)
    program = lower(trace(variance, [x]).graph).program
    cut = partial_reductions(program, GPU)
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
    cut = partial_reductions(program, GPU)
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
    found = interpret(partial_reductions(program, GPU), [x])
    near, q, r = found[0], found[1 + order.index("q")], found[1 + order.index("r")]
    n = x.shape[0]
    assert ((near.double() + r.double() / n - x[0].double()).abs() <= x[0].double().abs() * 2**-40).all()
    left = (q.double() / n - (r.double() / n) ** 2).abs()
    assert (left <= x[0].double() ** 2 * 2**-62).all(), left


def test_a_loss_over_stacked_states_is_cut_for_a_gpu() -> None:
    """What is read in turns is computed in turns: by one program it took longer than all of the cells."""

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(torch.stack([torch.tanh(h) * torch.sigmoid(h) for h in x.unbind(0)]), y)

    def cut(fn: Any, *inputs: torch.Tensor) -> bool:
        return any(b.endswith("_parts") for k in planned(fn, inputs).kernels() for b in k.writes)

    x, y = torch.randn(24, 16, 128), torch.randn(24, 16, 128)
    assert cut(loss, x, y)
    assert not cut(F.mse_loss, x, y)
    assert not cut(lambda x, y: (loss(x, y), F.l1_loss(x, y)), x, y)  # two that share a pass
    assert not cut(lambda x: F.layer_norm(torch.tanh(x.sin().exp()), (14000,)), torch.randn(4, 14000))
