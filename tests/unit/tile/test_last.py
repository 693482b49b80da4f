"""Small kernels in the last program of the one before: planned as for a GPU, run by Triton's interpreter, judged by float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from opforge.generated.tuning import Last
from opforge.runtime.build.triton_job import compile_job
from opforge.runtime.host.from_plan import host_program
from opforge.runtime.host.python import python_source
from opforge.runtime.kernels.plan import Plan
from opforge.runtime.machine import tuning_of
from opforge.runtime.render.triton_unit import TritonUnit, render_triton
from opforge.runtime.targets import cuda
from tests.support.gpu_plan import NUM_SMS, planned
from tests.support.loops import Ran, agree
from tests.support.triton_run import job_of, launch_interpreted, results

Case = tuple[Callable[..., Tensor | tuple[Tensor, ...]], Callable[[], list[Tensor]]]
ON = replace(tuning_of(), last=Last(rows=64, elements=4096))
CASES: dict[str, Case] = {
    "sum of all": (lambda x: x.sum(), lambda: [torch.randn(500, 601)]),
    "mean of all": (lambda x: x.exp().mean() * 2 + 1, lambda: [torch.randn(600, 500)]),
    "squared error": (F.mse_loss, lambda: [torch.randn(400, 512), torch.randn(400, 512)]),
    "few rows": (lambda x: (x * 2).sum(-1), lambda: [torch.randn(3, 65536 * 2)]),
    "maxima of few rows": (lambda x: x.amax(-1), lambda: [torch.randn(5, 65536)]),
    "norm": (lambda x: x / x.norm(), lambda: [torch.randn(600, 500)]),
    "bfloat16": (lambda x: x.sum(), lambda: [torch.randn(500, 600).bfloat16()]),
    "integers": (lambda x: (x * 3).sum(), lambda: [torch.randint(-9, 9, (500, 600))]),
    "two sums": (lambda x: (x.sum(), (x * x).sum()), lambda: [torch.randn(500, 600)]),
}


def unit_of(name: str, num_sms: int = NUM_SMS) -> tuple[Plan, list[Tensor], TritonUnit]:
    torch.manual_seed(0)
    fn, make = CASES[name]
    inputs = make()
    plan = planned(fn, inputs, num_sms)
    return plan, inputs, render_triton(plan, tuning=ON)


def test_right_and_the_semaphore_is_back_at_zero() -> None:
    # Few programs, since the interpreter runs one after another; and no maxima, which it combines one by one.
    found = {name: unit_of(name, 4) for name in CASES if name != "maxima of few rows"}
    jobs = [replace(job_of(plan, inputs), unit=unit) for plan, inputs, unit in found.values()]
    for (name, (plan, inputs, unit)), memory in zip(found.items(), launch_interpreted(jobs), strict=True):
        assert unit.chained, name
        assert int(memory["semaphore"]) == 0
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        exact, eager = (r if isinstance(r, tuple) else (r,) for r in (CASES[name][0](*wide), CASES[name][0](*inputs)))
        agree(Ran(results(plan, memory), exact, eager, plan, ""))


def test_only_in_tables_that_say_so() -> None:
    plan, _, unit = unit_of("sum of all")
    assert len(unit.kernels) == 1
    assert len(render_triton(plan, tuning=replace(ON, last=None)).kernels) == len(plan.kernels()) == 2


def test_not_where_launches_are_replayed() -> None:
    plan, _, unit = unit_of("sum of all")
    assert unit.chained
    assert not render_triton(plan, tuning=ON, replayed=True).chained


def test_what_is_too_large_has_its_own_launch() -> None:
    plan, _, unit = unit_of("few rows")
    less = replace(ON, last=Last(rows=2, elements=4096))
    assert unit.chained
    assert not render_triton(plan, tuning=less).chained
    assert not render_triton(plan, tuning=replace(ON, last=Last(rows=64, elements=16))).chained


def test_what_follows_reads_what_was_written() -> None:
    """The large kernel after a norm is one of its own."""
    plan, _, unit = unit_of("norm", 4)  # four programs together do not hold its row
    (members,) = unit.chained.values()
    assert len(members) < len(plan.kernels())
    assert plan.kernels()[-1].name not in members


def test_one_call_with_the_buffers_of_both() -> None:
    plan, _, unit = unit_of("sum of all")
    ((name, members),) = unit.chained.items()
    program = host_program(plan, [b.name for b in plan.inputs], {}, programs=unit.programs, groups=unit.groups)
    source = python_source(program, "cuda")
    assert source.count(f"{name}(") == 1
    assert not any(re.search(rf"\b{member}\(", source) for member in members)
    kernels = {k.name: k for k in plan.kernels()}
    passed = sum(len(kernels[m].reads) + len(kernels[m].writes) for m in members)
    (made,) = unit.kernels.values()
    assert len(made.pointers) == passed + 1  # the semaphore


@pytest.mark.parametrize("name", CASES)
def test_compiles_for_sm90(name: str, tmp_path: Path) -> None:
    _, _, unit = unit_of(name)
    for kernel in unit.kernels.values():
        assert compile_job(cuda.job_of(kernel, 90), tmp_path).cubin[:4] == b"\x7fELF"


def test_all_threads_meet_before_the_count_and_after_it(tmp_path: Path) -> None:
    """The order of memory in the machine's own words: stores, a barrier, one addition that releases and acquires, a barrier, loads."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tests.support.triton_run import _module

    _, _, unit = unit_of("sum of all")
    (kernel,) = unit.kernels.values()
    path = tmp_path / f"{kernel.name}.py"
    path.write_text(kernel.source)
    function = getattr(_module(path), kernel.name)
    names = [a for a in function.arg_names if not a.isupper()]
    signature = dict(zip(names, (f"*{t}" for t in kernel.pointers), strict=True))
    signature |= {"XBLOCK": "constexpr", "RBLOCK": "constexpr"}
    source = ASTSource(fn=function, signature=signature, constexprs={"XBLOCK": kernel.xblock, "RBLOCK": kernel.rblock})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernel.warps}).asm["ptx"]
    before, count, after = re.split(r"(atom\.\S*acq_rel\S*)", ptx)
    assert ".gpu." in count
    stored, met = before.rfind("st.global"), before.rfind("bar.sync")
    assert 0 < stored < met
    assert 0 < after.find("bar.sync") < after.find("ld.global") < after.rfind("st.global")
