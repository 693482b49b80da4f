"""Sizes that a call of the program brings: known from there on and not before, to readers, the verifier, the scheduler and the checker of plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opforge.errors import IRError, PlanError
from opforge.runtime.check.plan import check
from opforge.runtime.ir.learned import learned_by, symbols_of
from opforge.runtime.ir.nodes import Extern
from opforge.runtime.ir.text import dump
from opforge.runtime.ir.verify import verify
from opforge.runtime.kernels.plan import KernelStep
from opforge.runtime.schedule.pipeline import schedule
from tests.support.ir_text import parse

TEXT = """program
symbol u0
symbol size0 = 25
input n: int64[]
input x: float32[8] stride [1]
nest before: float32[8] for (i0<8)
  value mul(x[i0], 2.0:float32)
extern aten._local_scalar_dense.default(&n) effect learn u0 = result 0 learn size0 = "max(1, u0)" demand "u0 <= 8" "too many" from "item"
nest ones: float32[size0] for (i0<size0)
  value 1.0:float32
nest after: float32[8] for (i0<8)
  value mul(x[i0], to_dtype([u0]):float32)
output before
output ones
output after
"""


def test_the_text_says_what_is_learned() -> None:
    program = parse(TEXT)
    verify(program)
    assert dump(program) == TEXT
    assert learned_by(program.items) == {"u0", "size0"}
    assert [symbols_of(item) for item in program.items] == [set(), set(), {"size0"}, {"u0"}]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            ' learn u0 = result 0 learn size0 = "max(1, u0)"',
            ' learn size0 = "max(1, u0)" learn u0 = result 0',
            "needs u0",
        ),
        ('learn size0 = "max(1, u0)"', "learn u0 = result 0", "learned twice"),
        ('"u0 <= 8"', '"u1 <= 8"', "needs u1"),
        ("= result 0", "= x 0", "is not size 0 of result 'x'"),
    ],
)
def test_what_is_not_known_is_refused(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(IRError, match=message):
        verify(parse(TEXT.replace(old, new)))


def test_a_size_is_not_used_before_its_call() -> None:
    program = parse(TEXT)
    program.items = [program.items[2], *program.items[:2], program.items[3]]
    with pytest.raises(IRError, match="symbol 'size0' is not declared"):
        verify(program)


def test_kernels_stay_behind_the_call_that_tells_their_sizes() -> None:
    """`after` reads what `before` reads: it joined its kernel."""
    program = parse(TEXT)
    plan = schedule(program)
    check(program, plan)
    call = next(k for k, s in enumerate(plan.steps) if not isinstance(s, KernelStep))
    early = [n for s in plan.steps[:call] if isinstance(s, KernelStep) for n in s.kernel.defines]
    late = [n for s in plan.steps[call:] if isinstance(s, KernelStep) for n in s.kernel.defines]
    assert early == ["before"]
    assert sorted(late) == ["after", "ones"]
    plan.steps.insert(0, plan.steps.pop())
    with pytest.raises(PlanError, match="is not known yet"):
        check(program, plan)


def test_a_call_that_tells_a_size_stays() -> None:
    program = parse(TEXT)
    program.outputs = program.outputs[1:2]
    (call,) = (item for item in program.items if isinstance(item, Extern))
    assert replace(call) in [s.call for s in schedule(program).steps if not isinstance(s, KernelStep)]
