"""Calls of eager kernels whose results are on another device than the graph: its memory is not theirs."""

from __future__ import annotations

import torch

from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.ir.text import dump
from opforge.runtime.kernels.plan import ExternStep
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.schedule.planned import plan_of
from tests.support.ir_text import parse


def test_results_on_a_processor_are_not_in_the_memory_of_a_gpu() -> None:
    """A product of two CPU tensors in a GPU's graph was given memory of the GPU as `out=`, and raised."""
    a = torch.randn(4, 4)
    with torch.no_grad():
        traced = trace(lambda a: ((a @ a).exp() @ a,), [a])
    calls = {}
    for device in ("cpu", "cuda"):
        program = lower(traced.graph, device=device).program
        assert parse(dump(program)) == program
        plan = plan_of(separate_outputs(program), Config())
        calls[device] = [s for s in plan.steps if isinstance(s, ExternStep)]
    assert [bool(s.out) for s in calls["cpu"] if s.call.target == "aten.mm.default"] == [True, True]
    assert [s.call.target for s in calls["cuda"]] == ["aten.mm.default", "aten.exp.default", "aten.mm.default"]
    assert all(s.call.elsewhere and not s.out for s in calls["cuda"])
