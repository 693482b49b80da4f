"""Matrix products with something to compute beside them: planned as for a GPU, run by Triton's interpreter, judged by float64."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from opforge.runtime.build.triton_job import compile_job
from opforge.runtime.kernels.plan import ExternStep, Kernel, Plan
from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.targets import cuda
from opforge.runtime.tile.blocks import blocks
from opforge.runtime.tile.contraction import contraction
from opforge.runtime.tile.launch import launch
from tests.support.gpu_plan import planned
from tests.support.loops import Ran, agree
from tests.support.triton_run import job_of, launch_interpreted, results

Case = tuple[Callable[..., Tensor | tuple[Tensor, ...]], Callable[[], list[Tensor]]]


def half(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def weight(rows: int, columns: int) -> list[Tensor]:
    """Signed bytes and a scale for each row."""
    return [torch.randint(-128, 128, (rows, columns), dtype=torch.int8), torch.rand(rows).bfloat16() / 64]


def whole(q: Tensor, scale: Tensor) -> Tensor:
    return q.to(scale.dtype) * scale[:, None]


def and_before(x: Tensor, q: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    y = F.linear(x, whole(q, scale))
    return y, F.gelu(y), y > 0


def sums(x: Tensor, y: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide)[..., None] * y.to(wide)[..., None, :, :]).sum(-2).to(x.dtype)


def rows_of(x: Tensor, w: Tensor) -> Tensor:
    """Products of the rows of both, whose operands lie in rows."""
    return sums(x, w.mT)


# Rows of which no two neighbours begin at the same place of a vector: so many rows after the first one does again.
ALIGNMENT_GROUPS: dict[str, Case] = {
    "8": (rows_of, lambda: [half(1024, 40), half(1025, 40)]),
    "8, rows that are no whole blocks": (rows_of, lambda: [half(1111, 32), half(1283, 32)]),
    "4": (rows_of, lambda: [half(515, 40), half(1026, 40)]),
    "2, in batches": (rows_of, lambda: [half(2, 260, 40), half(2, 1028, 40)]),
    "8, two rows of axes": (lambda x, w: rows_of(x, w) * 2, lambda: [half(4, 257, 40), half(1031, 40)]),
    "4 of float32": (lambda x, w: rows_of(x, w).float(), lambda: [half(513, 40), half(1027, 40)]),
}  # fmt: skip

CASES: dict[str, Case] = {
    "linear": (lambda x, q, s: F.linear(x, whole(q, s)), lambda: [half(12, 96), *weight(200, 96)]),
    "steps that are no whole blocks": (lambda x, q, s: x @ whole(q, s).t(), lambda: [half(3, 77), *weight(40, 77)]),
    "many rows": (lambda x, q, s: F.linear(x, whole(q, s)), lambda: [half(2, 20, 64), *weight(130, 64)]),
    "bias and activation": (
        lambda x, q, s, b, r: F.gelu(F.linear(x, whole(q, s), b)) + r,
        lambda: [half(5, 64), *weight(96, 64), half(96), half(5, 96)],
    ),
    "scale of columns": (lambda x, q, s: x @ (q.to(x.dtype) * s[:, None]), lambda: [half(9, 48), *weight(48, 70)]),
    "gate": (
        lambda x, p, r, q, s: F.silu(F.linear(x, whole(p, r))) * F.linear(x, whole(q, s)),
        lambda: [half(16, 64), *weight(144, 64), *weight(144, 64)],
    ),
    "activation before": (lambda x, q, s: F.linear(x * 2 + 1, whole(q, s)), lambda: [half(12, 96), *weight(64, 96)]),
    "also what comes before the activation": (and_before, lambda: [half(12, 96), *weight(64, 96)]),
    "one row": (lambda x, q, s: F.linear(x, whole(q, s)), lambda: [half(1, 96), *weight(200, 96)]),
    "batches": (sums, lambda: [half(3, 20, 40), half(3, 40, 50)]),
    "rows of blocks": (sums, lambda: [half(300, 40), half(40, 150)]),
    **{f"alignment groups of {name}": case for name, case in ALIGNMENT_GROUPS.items()},
}  # fmt: skip


@pytest.fixture(scope="module")
def plans() -> dict[str, tuple[Plan, list[Tensor]]]:
    torch.manual_seed(0)
    made = {name: make() for name, (_, make) in CASES.items()}
    return {name: (planned(fn, made[name]), made[name]) for name, (fn, _) in CASES.items()}


@pytest.fixture(scope="module")
def ran(plans: dict[str, tuple[Plan, list[Tensor]]]) -> dict[str, Ran]:
    """Every case in one process of Triton's interpreter."""
    memories = launch_interpreted([job_of(plan, inputs) for plan, inputs in plans.values()])
    found = {}
    for (name, (plan, inputs)), memory in zip(plans.items(), memories, strict=True):
        fn = CASES[name][0]
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        exact, eager = (r if isinstance(r, tuple) else (r,) for r in (fn(*wide), fn(*inputs)))
        found[name] = Ran(results(plan, memory), exact, eager, plan, "")
    return found


@pytest.mark.parametrize("name", CASES)
def test_right(ran: dict[str, Ran], name: str) -> None:
    agree(ran[name])


@pytest.mark.parametrize("name", CASES)
def test_one_kernel(plans: dict[str, tuple[Plan, list[Tensor]]], name: str) -> None:
    """The weight is never stored, nor what comes after the sums."""
    plan, _ = plans[name]
    (kernel,) = plan.kernels()
    assert len(plan.steps) == 1
    # One row is a row reduction: no block of the matrix units is full.
    assert (contraction(kernel, plan.layouts) is None) == (name == "one row")


@pytest.mark.parametrize("name", ["gate", "rows of blocks"])
def test_compiles_for_sm90(plans: dict[str, tuple[Plan, list[Tensor]]], name: str, tmp_path: Path) -> None:
    for kernel in render_triton(plans[name][0]).kernels.values():
        assert compile_job(cuda.job_of(kernel, 90), tmp_path).cubin[:4] == b"\x7fELF"


def test_sums_that_keep_float32_are_no_products() -> None:
    """Matrix units add up less carefully than float32 operations one by one, which a program that asks for them gets."""
    plan = planned(lambda x, y: (x.float()[:, :, None] * y.float()).sum(1), [half(40, 64), half(64, 64)])
    (kernel,) = plan.kernels()
    assert contraction(kernel, plan.layouts) is None


def test_logits_of_an_odd_vocabulary_are_written_where_the_caller_has_them() -> None:
    """A library's product would be of padded rows, and copied."""
    plan = planned(F.linear, [half(8, 512, 64), half(1025, 64)])
    (kernel,) = plan.kernels()
    assert contraction(kernel, plan.layouts) is not None
    assert not any(isinstance(s, ExternStep) for s in plan.steps)


def test_a_factor_that_is_expensive_is_stored_in_its_own_dtype() -> None:
    """Each block of columns would compute the normalization again."""
    inputs = [half(8, 512, 64), half(1025, 64), half(64)]
    plan = planned(lambda x, w, s: F.linear(F.layer_norm(x, (64,), s), w), inputs)
    first, second = plan.kernels()
    assert contraction(second, plan.layouts) is not None
    assert set(first.writes) < set(second.reads)


def test_products_of_stored_operands_are_a_librarys() -> None:
    plan = planned(lambda x, w: F.relu(x @ w), [half(12, 96), half(96, 200)])
    assert any(isinstance(s, ExternStep) for s in plan.steps)


@pytest.mark.parametrize(
    ("rows", "columns", "count"),
    [(1024, 1025, 8), (1023, 1025, 0), (512, 1026, 4), (256, 1028, 2), (4096, 1032, 0), (1024, 1023, 0)],
)
def test_rows_that_begin_at_the_same_place_of_a_vector_share_a_block(rows: int, columns: int, count: int) -> None:
    """Where there are enough of them for a block each, and most blocks of columns are whole."""
    plan = planned(rows_of, [half(rows, 40), half(columns, 40)])
    (kernel,) = plan.kernels()
    assert turns_of(kernel, plan) == count
    shape = launch(kernel, plan.layouts)
    assert (shape.alignment_groups, blocks(shape)[0]) == (bool(count), 256 if count else 128)


def turns_of(kernel: Kernel, plan: Plan) -> int:
    """After how many rows one begins at the same place again, or 0."""
    found = contraction(kernel, plan.layouts)
    assert found is not None
    return 0 if found.alignment is None else found.alignment.count


NO_TURNS: dict[str, Case] = {
    "columns of an operand that are neighbours": (sums, lambda: [half(1024, 40), half(40, 1025)]),
    "two sums": (
        lambda x, p, q: F.silu(rows_of(x, p)) * rows_of(x, q),
        lambda: [half(1024, 40), half(1025, 40), half(1025, 40)],
    ),
    "costly ends": (lambda x, w: F.gelu(rows_of(x, w)), lambda: [half(1024, 40), half(1025, 40)]),
    "two results": (
        lambda x, w: ((y := rows_of(x, w)), y > 0),
        lambda: [half(1024, 40), half(1025, 40)],
    ),
    "what is added": (lambda x, w, r: rows_of(x, w) + r, lambda: [half(1024, 40), half(1025, 40), half(1024, 1025)]),
    "transposed results": (lambda x, w: rows_of(x, w).t().contiguous(), lambda: [half(1024, 40), half(1025, 40)]),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_TURNS)
def test_rows_are_in_order_where_turns_would_not_pay(name: str) -> None:
    fn, make = NO_TURNS[name]
    plan = planned(fn, make())
    products = [k for k in plan.kernels() if contraction(k, plan.layouts) is not None]
    assert products
    assert not any(turns_of(k, plan) for k in products)


@pytest.mark.parametrize("name", ["8", "8, two rows of axes", "4 of float32"])
def test_whole_vectors_are_stored_of_odd_lines(
    plans: dict[str, tuple[Plan, list[Tensor]]], name: str, tmp_path: Path
) -> None:
    """The source says what the compiler makes of it: 16 bytes at once, but for the ends of a line, and all of it in registers."""
    (kernel,) = render_triton(plans[f"alignment groups of {name}"][0]).kernels.values()
    (tmp_path / "k.cubin").write_bytes(compile_job(cuda.job_of(kernel, 90), tmp_path).cubin)
    tool = pytest.importorskip("triton").knobs.nvidia.nvdisasm.path
    text = subprocess.run([tool, "-c", tmp_path / "k.cubin"], capture_output=True, text=True, check=True).stdout
    assert "STG.E.128" in text
    assert not re.search(r"\b(STL|LDL)\b", text)
