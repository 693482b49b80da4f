"""Inputs that Triton kernels write in place: every element is read before it is written, by every thread. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from opforge.runtime.check.plan import check
from opforge.runtime.compile_fx import written_inside
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.ir.work import cost
from opforge.runtime.kernels.calls import any_strides, has_out
from opforge.runtime.kernels.plan import CopyStep, Plan
from opforge.runtime.kernels.steps import allocation_root
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.machine import PORTABLE
from opforge.runtime.render.triton import render_kernel
from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.schedule.draft import Options
from opforge.runtime.schedule.pipeline import schedule
from tests.support.machines import launched_on

pytest.importorskip("triton")

from tests.support.machines import H200
from tests.support.triton_run import compile_sm90, job_of, launch_interpreted

F = torch.nn.functional


def doubled(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x.sum(-1)


def softmax(x: torch.Tensor) -> None:
    x.copy_(x.softmax(-1))


def norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, mean, var, training=True)


def shifted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`y` is read along the rows and written once a row."""
    z = x * y[:, None]
    y.add_(z.sum(-1))
    return z


def adam(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    m.lerp_(g, 0.1)
    v.mul_(0.9).addcmul_(g, g, value=0.1)
    p.addcdiv_(m, v.sqrt() + 1e-3, value=-0.01)


def crossed(x: torch.Tensor, y: torch.Tensor) -> None:
    """Each is computed from both; what is stored first is read back."""
    x.mul_(2).add_(y)
    y.add_(x)


def half(x: torch.Tensor) -> torch.Tensor:
    x.exp_()
    return x * 3


def turned(x: torch.Tensor) -> None:
    """What is written is what the values are made of that are read at other points."""
    y = F.layer_norm(x, x.shape[1:])
    x.add_(torch.exp(torch.tanh(y.flip(1) + y.roll(1, 1))) * y.amax(1, keepdim=True))


def scaled(x: torch.Tensor, by: torch.Tensor) -> None:
    """Nothing is done where the factor is 1."""
    x.copy_(torch.where(by == 1, x, x * by))


def scaled_pieces(x: torch.Tensor, y: torch.Tensor, by: torch.Tensor) -> None:
    x.copy_(torch.where(by == 1, x, torch.cat([x[:300] * by, y])))


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "doubled": (doubled, [rand(20, 33)]),
    "doubled long rows": (doubled, [rand(3, 5000)]),
    "softmax": (softmax, [rand(20, 33)]),
    "softmax long rows": (softmax, [rand(3, 40000)]),
    "running statistics": (norm, [rand(8, 5, 7), rand(5), rand(5)]),
    "shifted": (shifted, [rand(20, 33), rand(20)]),
    "adam": (adam, [rand(1000) + k for k in range(4)]),
    "crossed": (crossed, [rand(1000), rand(1000) + 1]),
    "half precision": (half, [rand(40, 20, dtype=torch.bfloat16)]),
    "transposed": (doubled, [rand(33, 20).t()]),
    "turned": (turned, [rand(300, 33)]),
    "scaled": (scaled, [rand(30, 33, dtype=torch.bfloat16), torch.tensor(3.0)]),
    "scaled by one": (scaled, [rand(3000), torch.tensor(1.0)]),
    "scaled, many": (scaled, [rand(9, 50, 77).transpose(0, 1), torch.tensor(0.5)]),
    "scaled in pieces": (scaled_pieces, [rand(400), rand(100), torch.tensor(3.0)]),
}


ALL_STORED = replace(H200, target=replace(H200.target, costs=replace(H200.costs, recompute=0)))
"""A GPU for which no value is computed twice: then each is written in place."""


def plan_of(f: Callable[..., Any], inputs: list[torch.Tensor]) -> Plan:
    traced = trace(torch.fx.symbolic_trace(f), inputs)
    written = written_inside(traced)
    assert written
    program = separate_outputs(lower(traced.graph, written).program)
    # As for a processor, whose tiles have memory, but where that matters.
    plan = schedule(
        program,
        Options(
            costs=cost,
            out_variants=has_out,
            any_strides=any_strides,
            machine=ALL_STORED if f is turned else PORTABLE,
        ),
    )
    check(program, plan)
    assert not any(isinstance(step, CopyStep) for step in plan.steps)
    return launched_on(plan, H200)


@pytest.fixture(scope="module")
def ran() -> dict[str, tuple[Plan, dict[str, torch.Tensor]]]:
    """Every case in one process of Triton's interpreter."""
    plans = {name: plan_of(f, inputs) for name, (f, inputs) in CASES.items()}
    memories = launch_interpreted([job_of(plan, CASES[name][1]) for name, plan in plans.items()])
    return {name: (plans[name], memory) for name, memory in zip(plans, memories, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_inputs_have_eagers_new_contents(ran: dict[str, tuple[Plan, dict[str, torch.Tensor]]], name: str) -> None:
    plan, memory = ran[name]
    f, inputs = CASES[name]
    want = [t.clone() for t in inputs]
    f(*want)
    for b, t in zip(plan.inputs, want, strict=True):
        got = memory[b.name].as_strided(t.shape, t.stride())
        torch.testing.assert_close(got, t, rtol=2e-6 if t.dtype == torch.float32 else 0.0, atol=1e-6)


def rendered(name: str) -> list[str]:
    plan = plan_of(*CASES[name])
    return [
        render_kernel(k, plan.layouts, allocation_roots={b: allocation_root(plan, b) for b in (*k.reads, *k.writes)})
        for k in plan.kernels()
    ]


def test_threads_wait_for_each_other_before_a_store_over_what_is_read() -> None:
    """A column of a tile is held by several threads, of which one stores; they load it when they get there."""
    (source,) = rendered("shifted")
    lines = [line.strip() for line in source.splitlines()]
    over = next(k for k, line in enumerate(lines) if line.startswith("tl.store(add"))
    barrier = lines.index("tl.debug_barrier()")
    assert all("tl.load(" not in line for line in lines[barrier:over])
    assert any(line.startswith("v") and "tl.load(arg" in line for line in lines[:barrier])
    # One thread has each element of a kernel without inner loops.
    assert "debug_barrier" not in "".join(rendered("adam"))


def test_programs_that_would_change_nothing_end_at_once() -> None:
    (source,) = rendered("scaled")
    before, _, inside = source.partition("== 0:\n")
    assert "if tl.max(" in before
    assert "tl.load(arg0" not in before
    assert "tl.load(arg0" in inside
    assert all(line.startswith("        ") for line in inside.rstrip().splitlines())
    plan = plan_of(scaled, [torch.empty(9000, 9000), torch.tensor(1.0)])
    assert list(render_triton(plan).programs.values()) == [32768]  # a million would take half as long as the work
    # Where something else is stored as well, there is something to do.
    plan = plan_of(lambda x, by: (x.copy_(torch.where(by == 1, x, x * by)), x.sin())[1], CASES["scaled"][1])
    assert all(
        "if tl.max("
        not in render_kernel(k, plan.layouts, allocation_roots={b: allocation_root(plan, b) for b in plan.layouts})
        for k in plan.kernels()
    )


def test_barrier_in_each_turn_of_a_loop() -> None:
    source = rendered("softmax long rows")[-1]
    inside = source.rpartition("for roffset")[2]
    assert inside.index("tl.load(") < inside.index("        tl.debug_barrier()") < inside.index("tl.store(")


def test_what_a_phase_stores_it_does_not_load() -> None:
    plan = plan_of(*CASES["crossed"])
    (k,) = plan.kernels()
    (source,) = rendered("crossed")
    assert any(ld.attr.buffer in k.writes for p in k.phases for st in p.body for ld in st.value.loads())
    assert all(f"tl.load({b} " not in source for b in k.writes)


@pytest.mark.parametrize("name", ["shifted", "softmax long rows", "adam"])
def test_compiles_for_sm90(name: str) -> None:
    plan = plan_of(*CASES[name])
    for k in plan.kernels():
        assert compile_sm90(k, plan.layouts)[:4] == b"\x7fELF"
