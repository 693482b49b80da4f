"""Few long rows, gone through by several programs each: planned as for a GPU, run by Triton's interpreter, judged by float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from opforge.runtime.build.triton_job import compile_job
from opforge.runtime.config import Config
from opforge.runtime.ir.text import dump
from opforge.runtime.kernels.plan import Kernel, Plan
from opforge.runtime.kernels.text import plan_text
from opforge.runtime.lower.split.partial_sums import read_again
from opforge.runtime.render.triton_cooperative import PARTIAL_BYTES
from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.targets import cuda
from opforge.runtime.tile.launch import split_size
from tests.support.gpu_plan import NUM_SMS, planned
from tests.support.ir_text import parse
from tests.support.loops import Ran, agree
from tests.support.machines import H200
from tests.support.row_programs import kept
from tests.support.triton_run import job_of, launch_interpreted, results

Case = tuple[Callable[..., Tensor | tuple[Tensor, ...]], Callable[[], list[Tensor]]]
FEW = 12  # processors: the interpreter's programs take turns


CASES: dict[str, Case] = {
    "softmax": (lambda x: torch.softmax(x, -1), lambda: [torch.randn(2, 70000)]),
    "one row": (lambda x: x / x.norm(), lambda: [torch.randn(300, 500)]),
    "odd rows": (lambda x: torch.log_softmax(x, -1), lambda: [torch.randn(3, 50257)]),
    "bfloat16": (lambda x: torch.softmax(x.float(), -1).bfloat16(), lambda: [torch.randn(3, 50257).bfloat16()]),
    "statistics": (
        lambda x, w, b: F.layer_norm(x, (65536,), w, b),
        lambda: [torch.randn(4, 65536) + 100, torch.randn(65536), torch.randn(65536)],
    ),
    "groups": (lambda x: F.group_norm(x, 2), lambda: [torch.randn(1, 32, 64, 96)]),
    "channels": (lambda x: F.batch_norm(x, None, None, None, None, True), lambda: [torch.randn(8, 4, 64, 96)]),
    "two results": (
        lambda x: ((y := x - x.mean(-1, keepdim=True)), y.abs().amax(-1)),
        lambda: [torch.randn(2, 99999)],
    ),
    "infinities": (lambda x: torch.softmax(torch.where(x > 2, -torch.inf, x), -1), lambda: [torch.randn(2, 70000)]),
    "integers": (lambda x: x - x.sum(-1, keepdim=True), lambda: [torch.randint(-9, 9, (2, 70000))]),
    "computed of other elements": (
        lambda x: (y := x - x.mean(-1, True)) - y.roll(1, -1),
        lambda: [torch.randn(2, 70000)],
    ),
    "computed across": (
        lambda x: (y := x - x.mean((1, 2), True)).mT.contiguous() + y,
        lambda: [torch.randn(2, 272, 272)],
    ),
    "what was stored": (lambda x: ((y := torch.softmax(x, -1)), y * 2), lambda: [torch.randn(2, 70000)]),
    "a value that is kept": (kept, lambda: [torch.randn(3, 50257)]),
    "doubles": (lambda x: x / x.amax(-1, keepdim=True), lambda: [torch.rand(2, 70000, dtype=torch.float64)]),
}


def made(name: str, num_sms: int = NUM_SMS) -> tuple[Plan, list[Tensor]]:
    torch.manual_seed(0)
    fn, make = CASES[name]
    inputs = make()
    return planned(fn, inputs, num_sms), inputs


def cooperative(plan: Plan) -> list[Kernel]:
    return [k for k in plan.kernels() if k.splits > 1]


def test_right_and_the_semaphore_is_back_at_zero() -> None:
    found = {name: made(name, FEW) for name in CASES}
    memories = launch_interpreted([job_of(plan, inputs) for plan, inputs in found.values()])
    for (name, (plan, inputs)), memory in zip(found.items(), memories, strict=True):
        assert len(cooperative(plan)) == 1, name
        assert int(memory["semaphore"]) == 0, name
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        exact, eager = (r if isinstance(r, tuple) else (r,) for r in (CASES[name][0](*wide), CASES[name][0](*inputs)))
        agree(Ran(results(plan, memory), exact, eager, plan, ""))


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_that_compiles_for_sm90(name: str, tmp_path: Path) -> None:
    plan, _ = made(name)
    unit = render_triton(plan)
    ((called, workspace),) = unit.cooperative.items()
    kernel = unit.kernels[unit.symbols[called]]
    (one,) = cooperative(plan)
    # Of two results, the other is made by rows as they are read.
    assert len(plan.kernels()) == (3 if name == "two results" else 1)
    assert unit.programs[called] <= NUM_SMS
    assert workspace % (PARTIAL_BYTES * unit.programs[called]) == 0
    assert kernel.pointers[-2:] == ("i32", "i64")
    assert cuda.configurations(kernel, H200) == [kernel]
    assert f"each by {one.splits} programs" in plan_text(plan)
    binary = compile_job(cuda.job_of(kernel, 90), tmp_path)
    assert binary.cubin[:4] == b"\x7fELF"


def test_splits_make_up_a_row() -> None:
    for length in (131073, 50257, 65536, 200000):
        for wanted in range(2, 65):
            count = -(-length // split_size(wanted, length, H200))
            assert count <= wanted
            assert split_size(count, length, H200) * count >= length


def alone(plan: Plan) -> bool:
    return not cooperative(plan)


@pytest.mark.parametrize(
    ("why", "fn", "inputs"),
    [
        ("rows enough", lambda x: torch.softmax(x, -1), [torch.randn(300, 1024)]),
        ("nothing is read again", lambda x: x.sum(-1), [torch.randn(8, 131072)]),
        ("rows that do not fit", lambda x: torch.softmax(x, -1), [torch.randn(1, 5 << 20)]),
        ("positions", lambda x: x + x.argmax(-1, keepdim=True), [torch.randn(8, 131072)]),
        ("across memory", lambda x: torch.softmax(x, 0), [torch.randn(65536, 8)]),
        ("splits too short", lambda x: torch.softmax(x, -1), [torch.randn(132, 1500)]),
        ("little to do", lambda x: torch.softmax(x, -1), [torch.randn(4, 32000)]),
        ("a flip", lambda x: ((y := torch.softmax(x, -1)), y.flip(-1) * 2), [torch.randn(2, 70000)]),
        ("a transposed row", lambda x: ((y := x - x.mean((1, 2), True)), y.mT + y), [torch.randn(2, 272, 272)]),
        ("channels last", lambda x: F.group_norm(x, 1).flatten(2).mT.contiguous(), [torch.randn(1, 16, 96, 96)]),
        ("neighbours", lambda x: ((y := x - x.mean(-1, True)), y - y.roll(1, -1)), [torch.randn(2, 70000)]),
        (
            "a sum of others",
            lambda x: ((y := x - x.mean(-1, True)), y * (y * y.flip(-1)).sum(-1, True)),
            [torch.randn(2, 70000)],
        ),
        ("in place, flipped", lambda x: x.copy_(torch.softmax(x, -1).flip(-1)), [torch.randn(2, 70000)]),
        (
            "in place, turned",
            lambda x: x.copy_((x / x.norm(dim=-1, keepdim=True)).roll(5, -1)),
            [torch.randn(2, 70000)],
        ),
    ],
)
def test_left_alone(why: str, fn: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    assert alone(planned(fn, inputs)), why


def test_unfused_reductions_are_cut() -> None:
    """Where nothing is fused there is no kernel that goes through a row again: reductions are in parts as before."""
    from opforge.runtime.dispatch.trace import trace
    from opforge.runtime.lower.graph import lower
    from opforge.runtime.lower.outputs import separate_outputs

    program = separate_outputs(lower(trace(CASES["softmax"][0], [torch.randn(8, 131072)]).graph).program)
    whole = cuda.prepared(program, H200)
    cut = cuda.prepared(program, H200, Config(fusion=False))
    assert len(whole.items) < len(cut.items)
    assert read_again(program, replace(H200, num_sms=NUM_SMS))
    assert dump(parse(dump(whole))) == dump(whole)
    assert " cooperative" in dump(whole)
    assert " cooperative" not in dump(cut)
