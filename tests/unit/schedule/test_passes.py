"""The passes that make a plan: in order, each with a word on what it leaves, and each printable."""

from __future__ import annotations

import pytest

from opforge.runtime.kernels.text import plan_text
from opforge.runtime.machine import PORTABLE, Machine
from opforge.runtime.schedule.draft import Draft, Options
from opforge.runtime.schedule.pipeline import PASSES, schedule
from tests.support.ir_text import parse
from tests.support.machines import H200

PROGRAM = """
input x: float32[64, 32]
nest e: float32[64, 32] for (i0<64, i1<32)
  value exp(x[i0, i1])
nest s: float32[64] for (i0<64) reduce sum over (r0<32)
  value e[i0, r0]
extern t: float32[64] stride [1] = aten.relu.default(&s)
nest y: float32[64, 32] for (i0<64, i1<32)
  value div(e[i0, i1], t[i0])
output y
"""


@pytest.mark.parametrize("machine", [PORTABLE, H200], ids=["processor", "gpu"])
def test_each_pass_leaves_a_draft_that_can_be_read(machine: Machine) -> None:
    seen: dict[str, str] = {}
    plan = schedule(parse(PROGRAM), Options(machine=machine), lambda name, draft: seen.update({name: draft.text()}))
    assert list(seen) == [p.__name__ for p in PASSES]
    assert all(seen.values())
    assert seen["inline_values"].startswith("program")
    assert "call aten.relu.default" in seen["group"].splitlines()
    assert any(line.startswith("kernel for o0<64") for line in seen["group"].splitlines())
    assert seen["place"] == plan_text(plan)


def test_each_pass_says_what_it_leaves() -> None:
    assert [p.__name__ for p in PASSES if "eaves" not in (p.__doc__ or "")] == []


def test_a_pass_is_a_function_of_the_draft() -> None:
    """Nothing is kept between two drafts."""
    texts = []
    for _ in range(2):
        draft = Draft(parse(PROGRAM), Options())
        for one in PASSES:
            one(draft)
        texts.append(draft.text())
    assert texts[0] == texts[1]
