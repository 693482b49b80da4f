"""Values of a row that the same kernel reads at other points of it. A GPU's programs have no tile to index: what is cheap is computed again at these
points, the rest is in memory, behind a barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from opforge.runtime.build.triton_job import compile_job
from opforge.runtime.kernels.plan import Plan
from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.targets import cuda
from tests.support.gpu_plan import planned
from tests.support.loops import Ran, agree
from tests.support.row_programs import and_a_gradient, at_random, cells, padded, picked_beside, running, turned
from tests.support.triton_run import job_of, launch_interpreted, results

WIDTH = 40


PICKED = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(0))


CASES: dict[str, tuple[Callable[..., Tensor | tuple[Tensor, ...]], int, int, tuple[str, ...]]] = {
    # The program, the width of its rows, how many kernels it is, and what they store beside results.
    "a norm": (turned, WIDTH, 1, ()),
    "softmax": (lambda x: torch.softmax(x, 1).flip(1), WIDTH, 1, ()),
    "turned twice": (lambda x: turned(turned(x)), WIDTH, 1, ()),
    "in parts": (turned, 33000, 2, ("parts", "parts", "parts_apart")),
    "a running sum": (running, WIDTH, 1, ("_softmax_default_div",)),
    "padded": (padded, WIDTH, 1, ()),
    "read by others": (and_a_gradient, WIDTH, 1, ("sub_tensor",)),
}


def made(name: str) -> tuple[Plan, list[Tensor]]:
    torch.manual_seed(0)
    fn, width, *_ = CASES[name]
    inputs = [torch.randn(600 if width == WIDTH else 200, width)]
    return planned(fn, inputs), inputs


def test_right() -> None:
    found = {name: made(name) for name in CASES}
    memories = launch_interpreted([job_of(plan, inputs) for plan, inputs in found.values()])
    for (name, (plan, inputs)), memory in zip(found.items(), memories, strict=True):
        fn, _, kernels, _ = CASES[name]
        assert len(plan.kernels()) == kernels, name
        exact, eager = (r if isinstance(r, tuple) else (r,) for r in (fn(inputs[0].double()), fn(*inputs)))
        agree(Ran(results(plan, memory), exact, eager, plan, ""))


@pytest.mark.parametrize("name", CASES)
def test_what_is_stored(name: str, tmp_path: Path) -> None:
    plan, _ = made(name)
    results_of = {o.buffer for o in plan.outputs}
    own = [b for k in plan.kernels() for b in k.writes if b not in results_of]
    assert len(own) == len(CASES[name][3])
    assert all(b.endswith(end) for b, end in zip(own, CASES[name][3], strict=True))
    kernels = render_triton(plan).kernels.values()
    for buffer in own if len(kernels) == 1 else ():
        (kernel,) = kernels
        stored = kernel.source.index(f"tl.store({buffer} ")
        assert stored < kernel.source.index("tl.debug_barrier()", stored) < kernel.source.index(f"tl.load({buffer} ")
    for kernel in kernels:
        assert compile_job(cuda.job_of(kernel, 90), tmp_path).cubin[:4] == b"\x7fELF"


def test_places_are_checked_where_they_count() -> None:
    plan = planned(picked_beside, [torch.randn(600, WIDTH), PICKED])
    (kernel,) = render_triton(plan).kernels.values()
    (there,) = (line.split(" = ")[0].strip() for line in kernel.source.splitlines() if line.endswith("(r0_0) >= (20)"))
    (checked,) = (line for line in kernel.source.splitlines() if "tp.bounded(" in line)
    assert f"rmask0 & {there}, 'IndexError" in checked
    loads = [line for line in kernel.source.splitlines() if "tl.load(arg1" in line]
    assert loads
    assert all(f"rmask0 & {there}," in line for line in loads)


def test_random_programs_can_be_said() -> None:
    """A kernel that Triton cannot say would cost the whole graph its fusion."""
    for seed in range(60):
        render_triton(planned(at_random(seed), [torch.randn(600, WIDTH)]))


@pytest.mark.parametrize("steps", [13, 20])
def test_a_gradient_through_time(steps: int) -> None:
    inputs = [torch.randn(8, steps, 32), torch.randn(32, 32), torch.randn(32, 32), torch.randn(32)]
    plan = planned(torch.func.grad(cells, (0, 1, 2, 3)), inputs)
    render_triton(plan)
    assert len(plan.kernels()) < 4 * steps
