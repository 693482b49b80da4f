"""What a GPU can run as one kernel is known before memory is planned: values that registers cannot hold go to memory, and memory is not shared
where a value is computed again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from opforge.errors import PlanError, UnsupportedError
from opforge.generated.cpp_scalars import CPP
from opforge.generated.scalars import SCALARS
from opforge.generated.triton_scalars import TRITON, TRITON_KIND
from opforge.runtime.check.plan import check
from opforge.runtime.kernels.plan import Allocation, Kernel, KernelStep
from opforge.runtime.memory.arena import could_hold
from opforge.runtime.schedule.draft import Options
from opforge.runtime.schedule.legal import legal_kernel
from opforge.runtime.schedule.pipeline import schedule
from opforge.runtime.tile.legal import atomic, in_registers, refusal
from tests.support.gpu_plan import planned
from tests.support.ir_text import parse
from tests.support.machines import H200
from tests.support.plans import kernel
from tests.support.row_programs import sums_in_memory
from tests.support.triton_run import job_of, launch_interpreted, results
from tests.unit.render.test_triton import ROWS, layouts, rows

N = 20000
EXP = (f"r0<{N}", ["store t[r0] exp(x[o0, r0])", "reduce m sum exp(x[o0, r0])"])
LONG = layouts(x=("float32", (4, N)), y=("float32", (4, N)), z=("float32", (4, N)))


def test_running_results_that_registers_do_not_hold_are_in_memory() -> None:
    """They are one kernel with what reads them all the same: a long row, of which a scan goes through tile by tile."""
    torch.manual_seed(0)
    inputs = [torch.randn(3, 9000) for _ in range(5)]

    def normal(x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        a, b, c, d = more
        return torch.softmax((x * a * b * c * d).cumsum(1) + a, 1)

    functions = sums_in_memory, normal
    plans = [planned(f, inputs) for f in functions]
    for f, plan, memory in zip(functions, plans, launch_interpreted([job_of(p, inputs) for p in plans]), strict=True):
        (one,) = plan.kernels()
        assert not one.scratch
        assert len(one.writes) == 2
        (found,) = results(plan, memory)
        exact = f(*[x.double() for x in inputs])
        assert float((found - exact).abs().max()) <= 2e-5 * float(exact.abs().max()), f


def test_tiles_that_are_computed_again_forbid_aliases() -> None:
    """`t` is computed again of `x` in a loop that stores `y`, at other points: `y` may not lie over `x`. In the order of the loop it may."""
    turned = rows(EXP, (f"r1<{N}", [f"store y[o0, r1] div(t[{N - 1} - r1], m[])"]), scratch=f"t: float32[{N}]")
    assert in_registers(turned, LONG).no_alias == {("x", "y")}
    straight = rows(EXP, (f"r1<{N}", ["store y[o0, r1] div(t[r1], m[])"]), scratch=f"t: float32[{N}]")
    assert in_registers(straight, LONG).no_alias == frozenset()
    twice = rows(
        EXP,
        (f"r1<{N}", ["store y[o0, r1] div(t[r1], m[])"]),
        (f"r2<{N}", ["store z[o0, r2] mul(t[r2], m[])"]),
        scratch=f"t: float32[{N}]",
    )
    assert in_registers(twice, LONG).no_alias == {("x", "y")}


def test_memory_is_planned_accordingly() -> None:
    one = rows((f"r0<{N}", ["store y[o0, r0] exp(x[o0, r0])"]))
    assert could_hold(KernelStep(one), "y", LONG) == ("x",)
    assert could_hold(KernelStep(replace(one, no_alias=frozenset({("x", "y")}))), "y", LONG) == ()


def test_the_checker_proves_it() -> None:
    program = parse("""
input x: float32[64]
nest e: float32[64] for (i0<64)
  value exp(x[i0])
nest n: float32[64] for (i0<64)
  value neg(e[i0])
output n
""")
    plan = schedule(program, Options(machine=H200))
    (step,) = plan.steps
    assert isinstance(step, KernelStep)
    plan.steps = [KernelStep(replace(step.kernel, no_alias=frozenset({("x", "n")})))]
    check(program, plan)
    plan.allocations["n"] = Allocation("alias", 0, "x")
    with pytest.raises(PlanError, match="'n' lies over 'x'"):
        check(program, plan)


def test_what_cannot_stay_nor_be_computed_again_is_spilled() -> None:
    use = (f"r1<{N}", ["store y[o0, r1] neg(t[r1])"])
    scan = rows((f"r0<{N}", ["scan sum t[r0] x[o0, r0]"]), use, scratch=f"t: float32[{N}]")
    assert in_registers(scan, LONG).spilled == {"t": "it is no plain value of each point"}
    over = (f"r1<{N}", [f"store x[o0, r1] div(t[{N - 1} - r1], m[])"])
    stored = replace(rows(EXP, over, scratch=f"t: float32[{N}]"), reads=(), writes=("x",))
    assert in_registers(stored, LONG).spilled == {"t": "'x', of which it is made, is stored over before it is read"}


def test_spilled_values_are_in_memory() -> None:
    """The kernel is built again until no tile is left that would have to be."""
    scan = (f"r0<{N}", ["scan sum tile_t[r0] x[o0, r0]"])
    asked: list[frozenset[str]] = []

    def build(in_memory: frozenset[str]) -> Kernel:
        asked.append(in_memory)
        if "t" in in_memory:
            use = (f"r1<{N}", ["store y[o0, r1] neg(t[o0, r1])"])
            stored = (f"r0<{N}", ["scan sum t[o0, r0] x[o0, r0]"])
            return kernel("k", "o0<4", [stored, use], {**ROWS, "t": "float32"})
        return rows(scan, (f"r1<{N}", ["store y[o0, r1] neg(tile_t[r1])"]), scratch=f"tile_t: float32[{N}]")

    assert not legal_kernel(build, LONG | layouts(t=("float32", (4, N)))).scratch
    assert asked == [frozenset(), frozenset({"t"})]


def test_what_no_gpu_runs_is_refused_with_the_reason() -> None:
    update = kernel("k", "o0<4", [("", ["store prod y[at(i[o0], 0, 3)] x[o0]"])], {**ROWS, "i": "int64"})
    table = layouts(x=("float32", (4,)), y=("float32", (4,)), i=("int64", (4,)))
    says = "Triton has no atomic for an indexed update by 'prod' of float32"
    assert refusal(update, table) == says
    with pytest.raises(UnsupportedError, match=says):
        legal_kernel(lambda in_memory: update, table)
    ordered = kernel("k", "o0<4", [("", ["store y[at(i[o0], 0, 3)] x[o0]"])], {**ROWS, "i": "int64"})
    assert refusal(ordered, table) == ""
    assert refusal(replace(ordered, serial=True), table) == "the order of its updates matters"
    inner = rows(("r0<3, r1<5", ["scan sum y[o0, r0] x[o0, r0]"]))
    assert "another one around it" in refusal(inner, layouts(x=("float32", (4, 3)), y=("float32", (4, 3))))


def test_atomics() -> None:
    assert atomic("sum", "bfloat16") == "add"
    assert atomic("max", "bfloat16") == ""
    assert atomic("min", "int32") == "min"
    assert atomic("sum", "int8") == ""
    assert atomic("prod", "float32") == ""


def test_each_scalar_is_spelled() -> None:
    """In C++ and in Triton: no writer of kernels meets one that it cannot say."""
    spelled = {op for op, _ in TRITON_KIND} | set(TRITON)
    assert [op for op in SCALARS if op not in CPP or op not in spelled] == []
