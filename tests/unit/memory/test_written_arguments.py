"""Calls that write into their arguments: where their results live, and what the plan checker says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from opforge.errors import IRError, PlanError
from opforge.runtime.check.plan import check
from opforge.runtime.host.from_plan import host_program
from opforge.runtime.host.python import python_source
from opforge.runtime.ir.nodes import Program
from opforge.runtime.ir.text import dump
from opforge.runtime.ir.verify import verify
from opforge.runtime.kernels.plan import Allocation, CopyStep, Plan, ViewOf
from opforge.runtime.schedule.pipeline import schedule
from tests.support.ir_text import parse
from tests.support.plans import call_of, dtypes_of, kernel, plan_of

ONE = """
input x: float32[4]
nest a: float32[4] for (i0<4)
  value exp(x[i0])
extern m: float32[4] stride [1] = run_f(&a, [&x]) many compiled writes 1
nest y: float32[4] for (i0<4)
  value neg(m[i0])
output y
"""


def _program(text: str) -> Program:
    program = parse(text)
    verify(program)
    assert parse(dump(program)) == program
    return program


def _plan(
    text: str = ONE, out: tuple[str, ...] = ("m",), order: str = "aey", **allocations: Any
) -> tuple[Program, Plan]:
    program = _program(text)
    d = dtypes_of(program)
    table = {
        "a": kernel("ka", "o0<4", [("", ["store a[o0] exp(x[o0])"])], d),
        "e": replace(call_of(program, "run_f"), out=out),
        "y": kernel("ky", "o0<4", [("", ["store y[o0] neg(m[o0])"])], d),
    }
    own = {name: Allocation("dedicated") for name in ("a", *out)}
    return program, plan_of(program, [table[s] for s in order], {**own, **allocations})


def _reject(program: Program, plan: Plan, *parts: str) -> None:
    with pytest.raises(PlanError) as error:
        check(program, plan)
    for part in parts:
        assert part in str(error.value)


def test_a_copy_and_in_place_are_right() -> None:
    check(*_plan())
    check(*_plan(m=Allocation("alias", of="a")))


def test_over_another_argument() -> None:
    _reject(*_plan(m=Allocation("alias", of="x")), "step 1 (extern 'run_f')", "'m' is written over argument 'x'")


def test_in_place_of_what_it_also_reads() -> None:
    text = ONE.replace("[&x]", "[&a]")
    check(*_plan(text))
    _reject(*_plan(text, m=Allocation("alias", of="a")), "'m' is written over argument 'a'")


def test_in_place_of_a_part() -> None:
    text = ONE.replace("nest a: float32[4] for (i0<4)", "nest a: float32[8] for (i0<8)").replace(
        "exp(x[i0])", "exp(x[i0 % 4])"
    )
    text = text.replace("extern", "nest b: float32[4] for (i0<4)\n  value a[i0 + 4]\nextern").replace("(&a", "(&b")
    program = _program(text)
    d = dtypes_of(program)
    a = kernel("ka", "o0<8", [("", ["store a[o0] exp(x[o0 % 4])"])], d)
    y = kernel("ky", "o0<4", [("", ["store y[o0] neg(m[o0])"])], d)
    e = replace(call_of(program, "run_f", b=ViewOf("a", (4,), (1,), 4)), out=("m",))
    check(program, plan_of(program, [a, e, y], {"a": Allocation("dedicated"), "m": Allocation("dedicated")}))
    allocations = {"a": Allocation("dedicated"), "m": Allocation("alias", 16, "a")}
    _reject(program, plan_of(program, [a, e, y], allocations), "'m' is written over argument 'a'")


def test_results_must_be_what_is_written() -> None:
    _reject(*_plan(out=(), m=Allocation("extern")), "it writes into its arguments, which are not its results")


def test_contents_from_before_are_lost() -> None:
    text = ONE.replace("neg(m[i0])", "add(m[i0], a[i0])")
    program = _program(text)
    d = dtypes_of(program)
    steps = [
        kernel("ka", "o0<4", [("", ["store a[o0] exp(x[o0])"])], d),
        replace(call_of(program, "run_f"), out=("m",)),
        kernel("ky", "o0<4", [("", ["store y[o0] add(m[o0], a[o0])"])], d),
    ]
    check(program, plan_of(program, steps, {"a": Allocation("dedicated"), "m": Allocation("dedicated")}))
    allocations = {"a": Allocation("dedicated"), "m": Allocation("alias", of="a")}
    _reject(
        program, plan_of(program, steps, allocations), "'a' is read after its memory was overwritten by 'm' in step 1"
    )


TWO = """
input x: float32[4]
extern m: float32[4] stride [1]; n: float32[4] stride [1] = run_f(None, &x) many compiled writes 2
output m
output n
"""


def test_two_results_in_one_memory() -> None:
    program = _program(TWO)
    step = replace(call_of(program, "run_f"), out=("m", "n"))
    check(program, plan_of(program, [step], {"m": Allocation("dedicated"), "n": Allocation("dedicated")}))
    allocations = {"m": Allocation("dedicated"), "n": Allocation("alias", of="m")}
    _reject(program, plan_of(program, [step], allocations), "results 'm' and 'n' share memory")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TWO.replace("writes 2", "writes 1"), "it writes into 1 of 2 arguments and has 2 results"),
        (TWO.replace("None", "3"), "it writes into 3"),
        (TWO.replace("n: float32[4]", "n: float32[5]"), "'n' is float32[5], it writes into float32[4]"),
    ],
)
def test_wrong_programs(text: str, says: str) -> None:
    with pytest.raises(IRError) as error:
        verify(parse(text))
    assert says in str(error.value)


def _scheduled(text: str) -> tuple[Plan, str]:
    program = _program(text)
    plan = schedule(program)
    check(program, plan)
    return plan, python_source(host_program(plan, [b.name for b in program.inputs], {}))


def test_the_scheduler_writes_over_what_is_dead() -> None:
    plan, wrapper = _scheduled(ONE)
    assert plan.allocations["m"] == Allocation("alias", 0, "a")
    assert ".copy_(" not in wrapper
    assert "run_f(space.m, [x])" in wrapper


def test_the_scheduler_copies_what_is_read_later() -> None:
    plan, wrapper = _scheduled(ONE.replace("neg(m[i0])", "add(m[i0], a[i0])"))
    assert plan.allocations["m"].kind == "arena"
    assert "space.m.copy_(space.a)" in wrapper


def test_an_input_is_copied() -> None:
    _, wrapper = _scheduled(ONE.replace("(&a, [&x])", "(&x, [&a])"))
    assert "space.m.copy_(x)" in wrapper


CHAIN = """
input x: float32[4]
input z: float32[4]
extern m: float32[4] stride [1] = run_f(&x) many compiled writes 1
extern n: float32[4] stride [1] = run_g(&m, [&z]) many compiled writes 1
mutate x = n
"""


def test_an_input_is_written_by_calls_one_after_another() -> None:
    plan, wrapper = _scheduled(CHAIN)
    assert plan.allocations["m"] == plan.allocations["n"] == Allocation("alias", 0, "x")
    assert not any(isinstance(s, CopyStep) for s in plan.steps)
    assert "run_f(x)" in wrapper
    assert "run_g(x, [z])" in wrapper


@pytest.mark.parametrize(
    "more",
    [
        "extern k: float32[4] stride [1] = ns.f.default(&x)\noutput k\n",  # it reads the old contents
        "extern k: float32[4] stride [1] = ns.f.default(&z)\noutput k\n",  # it may raise
        "output m\n",
    ],
)
def test_an_input_is_written_at_the_end_where_somebody_could_tell(more: str) -> None:
    plan, _ = _scheduled(CHAIN.replace("mutate", more + "mutate"))
    assert plan.allocations["n"] != Allocation("alias", 0, "x")
    assert any(isinstance(s, CopyStep) for s in plan.steps)


def test_what_is_returned_is_written_in_its_own_memory() -> None:
    """The value before it is not put into the arena, from where it would be copied."""
    text = ONE.replace("output y", "output m\noutput y")
    plan, wrapper = _scheduled(text)
    assert plan.allocations["a"] == Allocation("dedicated")
    assert ".copy_(" not in wrapper
