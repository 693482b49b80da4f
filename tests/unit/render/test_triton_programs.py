"""Small memory-bound programs planned as for a GPU: the plan is checked, its kernels run by Triton's interpreter, and judged by float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.machines import H200

pytest.importorskip("triton")

from opforge.generated.rewrites import RULES
from opforge.runtime.build.triton_job import compile_job
from opforge.runtime.check.plan import check
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.graph.rewrite import rewrite
from opforge.runtime.kernels.plan import Accumulate, ExternStep, Kernel, Plan, Store
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.targets import cuda
from opforge.runtime.targets.cuda import prepared, scheduled
from tests.support.loops import Ran, agree
from tests.support.triton_run import job_of, launch_interpreted, results

ATEN = torch.ops.aten
NUM_SMS = 132
Case = tuple[Callable[..., Any], Callable[[], list[Tensor]]]


def layer_norm_backward(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return ATEN.native_layer_norm_backward(dy, x, [w.shape[0]], mean, rstd, w, w, [True, True, True])


def layer_norm_inputs(*lead: int, width: int) -> list[Tensor]:
    x = torch.randn(*lead, width) * 3 + 1
    mean = x.mean(-1, keepdim=True)
    return [torch.randn(*lead, width), x, mean, x.var(-1, keepdim=True).rsqrt(), torch.randn(width)]


def gradient_and_more(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    dx, dw, db = layer_norm_backward(dy, x, mean, rstd, w)
    return dx + y, dw, db


def rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = (x + residual).float()
    return (y * torch.rsqrt(y.square().mean(-1, True) + 1e-6)).to(x.dtype) * weight, y.to(x.dtype)


def residual_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y = x + residual
    return y, F.layer_norm(y, (96,), weight, bias)


def kl(x: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(x, -1), F.log_softmax(y, -1), reduction="batchmean", log_target=True)


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    m, v = torch.lerp(m, g, 0.1), v.abs() * 0.999 + 0.001 * g * g
    return p * 0.999 - 1e-3 * m / (v.sqrt() + 1e-8), m, v


randn = torch.randn


def half(*shape: int) -> Tensor:
    return randn(*shape).bfloat16()


CASES: dict[str, Case] = {
    "layer norm backward": (layer_norm_backward, lambda: layer_norm_inputs(600, width=250)),
    "layer norm backward of three dimensions": (layer_norm_backward, lambda: layer_norm_inputs(4, 150, width=256)),
    "layer norm backward and a sum": (
        gradient_and_more,
        lambda: [*layer_norm_inputs(600, width=256), randn(600, 256)],
    ),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (96,), w, b), lambda: [half(50, 96), half(96), half(96)]),
    "residual rms norm": (rms_norm, lambda: [half(40, 96), half(40, 96), half(96)]),
    "group norm": (lambda x, w, b: F.silu(F.group_norm(x, 2, w, b)), lambda: [randn(2, 4, 100, 101), randn(4), randn(4)]),
    "batch norm": (
        lambda x, m, v, w, b: F.relu(F.batch_norm(x, m, v, w, b)),
        lambda: [randn(3, 6, 10, 11), randn(6), torch.rand(6) + 0.5, randn(6), randn(6)],
    ),
    "cross entropy": (F.cross_entropy, lambda: [randn(3, 17000), torch.randint(0, 17000, (3,))]),
    "kl divergence": (kl, lambda: [randn(3, 17000), randn(3, 17000)]),
    "log softmax": (lambda x: F.log_softmax(x, -1), lambda: [randn(2, 33001)]),
    "log softmax in registers": (lambda x: F.log_softmax(x, -1), lambda: [randn(2, 17001)]),
    "group norm of planes": (lambda x, w, b: F.silu(F.group_norm(x, 2, w, b)), lambda: [randn(2, 4, 64, 160), randn(4), randn(4)]),
    "argmax": (lambda x: (x.argmax(-1), x.argmin(-1)), lambda: [torch.randint(0, 5000, (3, 17000)).float()]),
    "residual layer norm": (residual_layer_norm, lambda: [half(40, 96), half(40, 96), half(96), half(96)]),
    "gelu": (lambda x: (F.gelu(x), F.gelu(x, approximate="tanh")), lambda: [half(40, 50) * 3]),
    "softmax of few rows": (lambda x: x.softmax(-1), lambda: [randn(3, 1 << 16)]),
    "softmax": (lambda x: x.softmax(-1), lambda: [half(30, 129)]),
    "masked softmax": (
        lambda x, m: x.masked_fill(m == 0, float("-inf")).softmax(-1).nan_to_num(0),
        lambda: [randn(10, 200, 200), torch.randint(0, 2, (200, 200))],
    ),
    "masked softmax of few rows": (
        lambda x, m: x.masked_fill(m == 0, float("-inf")).softmax(-1).nan_to_num(0),
        lambda: [randn(3, 9, 60), torch.randint(0, 2, (9, 60))],
    ),
    "gated": (lambda x: F.silu(x[:, :48]) * x[:, 48:], lambda: [half(30, 96)]),
    "normalized by all": (lambda x: x / x.norm(), lambda: [randn(400, 500)]),
    "sums of all and of columns": (lambda x: (x.sum(), x.sum(0)), lambda: [torch.rand(600, 250)]),
    "sums and maxima of rows": (lambda x: (x.sum(), x.sum(1), (x * 2).amax(1)), lambda: [torch.rand(30, 100)]),
    "index add": (lambda x, i, r: x.index_add(0, i, r), lambda: [randn(65, 64), torch.randint(0, 65, (300,)), randn(300, 64)]),
    "embedding backward": (
        lambda g, i: ATEN.embedding_dense_backward(g, i, 70, -1, False),
        lambda: [randn(40, 33), torch.randint(0, 70, (40,))],
    ),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), lambda: [randn(2, 3, 20, 21)]),
    "average pool": (lambda x: F.avg_pool2d(x, 2), lambda: [randn(2, 3, 20, 22)]),
    "quantize": (
        lambda x: ((x / (x.abs().amax(-1, keepdim=True) / 127)).round().to(torch.int8), x.abs().amax(-1, keepdim=True)),
        lambda: [randn(30, 200)],
    ),
    "transpose": (lambda x, y: x + y.t(), lambda: [randn(100, 130), randn(130, 100)]),
    "channels last": (lambda x: (x * 2).contiguous(memory_format=torch.channels_last), lambda: [randn(2, 20, 16, 24)]),
    "concatenation": (lambda a, b, c: torch.cat([a.relu(), b * 2, c], 1), lambda: [randn(30, 17), randn(30, 40), randn(30, 9)]),
    "concatenation of blocks": (
        lambda a, b, c: torch.cat([a.relu(), b * 2, c.tanh()], 1), lambda: [randn(3, 512), randn(3, 1024), randn(3, 512)]
    ),
    "concatenation of rows": (lambda a, b: torch.cat([a.relu(), b * 2]).t(), lambda: [randn(4, 256), randn(2, 256)]),
    "optimizer": (adamw, lambda: [randn(40, 50) for _ in range(4)]),
}  # fmt: skip


PLANNED = ("masked softmax", "softmax of few rows")  # too large for the interpreter: minutes


def planned(fn: Callable[..., Any], inputs: list[Tensor], externs: bool = False) -> Plan:
    """The plan for a GPU, checked; without calls of eager kernels, unless `externs`."""
    cfg = Config()
    with torch.no_grad():
        traced = trace(fn, inputs)
    rewrite(traced.graph, RULES)
    program = prepared(separate_outputs(lower(traced.graph).program), H200)
    plan = scheduled(program, cfg, H200)
    check(program, plan)
    assert externs or not any(isinstance(step, ExternStep) for step in plan.steps)
    return plan


@pytest.fixture(scope="module")
def plans() -> dict[str, tuple[Plan, list[Tensor]]]:
    torch.manual_seed(0)
    made = {name: make() for name, (_, make) in CASES.items()}
    return {name: (planned(fn, made[name]), made[name]) for name, (fn, _) in CASES.items()}


@pytest.fixture(scope="module")
def ran(plans: dict[str, tuple[Plan, list[Tensor]]]) -> dict[str, Ran]:
    """Every case in one process of Triton's interpreter."""
    plans = {name: plan for name, plan in plans.items() if name not in PLANNED}
    memories = launch_interpreted([job_of(plan, inputs) for plan, inputs in plans.values()])
    found = {}
    for (name, (plan, inputs)), memory in zip(plans.items(), memories, strict=True):
        fn = CASES[name][0]
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        exact, eager = (r if isinstance(r, tuple) else (r,) for r in (fn(*wide), fn(*inputs)))
        found[name] = Ran(results(plan, memory), exact, eager, plan, "")
    return found


@pytest.mark.parametrize("name", [name for name in CASES if name not in PLANNED])
def test_right(ran: dict[str, Ran], name: str) -> None:
    agree(ran[name])


def kernels(plans: dict[str, tuple[Plan, list[Tensor]]], name: str) -> list[Kernel]:
    return plans[name][0].kernels()


def test_rows_and_columns_share_a_pass(plans: dict[str, tuple[Plan, list[Tensor]]]) -> None:
    for name in CASES:
        if "layer norm backward" in name:
            first, *finish = kernels(plans, name)
            assert first.grid_loop
            assert sum(isinstance(st, Accumulate) for p in first.phases for st in p.body) == 2
            assert all("parts" in name for k in finish for name in k.reads)
            assert not any(k.grid_loop for k in finish)


def test_what_is_cheap_is_not_stored(plans: dict[str, tuple[Plan, list[Tensor]]]) -> None:
    assert len(kernels(plans, "residual rms norm")) == 1
    assert len(kernels(plans, "group norm")) == 1
    assert len(kernels(plans, "batch norm")) == 1
    for name in ("cross entropy", "kl divergence"):
        plan, inputs = plans[name]
        written = [plan.layouts[b] for k in plan.kernels() for b in k.writes]
        assert all(b.shape != tuple(inputs[0].shape) for b in written)


def test_what_a_product_reads_is_not_computed_again() -> None:
    """The gradient of a bias sums what the product is stored for, and reads neither of the two that it is made of."""

    def run(a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        x = a * b + a * 0.5
        return x.view(256, 48) @ w, x.sum([0, 1])

    plan = planned(run, [randn(4, 64, 48), randn(4, 64, 48), randn(48, 8)], externs=True)
    first, *others = plan.kernels()
    assert len(first.reads) == 2
    assert all(len(k.reads) == 1 for k in others)


def test_what_is_small_and_read_often_is_stored(plans: dict[str, tuple[Plan, list[Tensor]]]) -> None:
    """A mask of single bytes rather than of eight."""
    first, second = kernels(plans, "masked softmax")
    (mask,) = first.writes
    assert plans["masked softmax"][0].layouts[mask].dtype == "bool"
    assert mask in second.reads


def test_many_points_are_not_left_to_few_programs(plans: dict[str, tuple[Plan, list[Tensor]]]) -> None:
    for name in ("normalized by all", "softmax of few rows"):
        plan, inputs = plans[name]
        unit = render_triton(plan)
        for k in plan.kernels():
            if any(plan.layouts[b].shape == tuple(inputs[0].shape) for b in k.writes):
                programs = unit.programs[k.name]
                assert isinstance(programs, int)
                # Those of cooperative kernels hold all that they work on, one on each processor; whole rows have as many.
                assert programs >= NUM_SMS if k.splits == 1 else NUM_SMS * 3 // 4 < programs <= NUM_SMS


def test_updates_by_independent_programs(plans: dict[str, tuple[Plan, list[Tensor]]]) -> None:
    base, update = kernels(plans, "index add")
    assert not base.serial
    assert not update.serial
    (store,) = update.phases[0].body
    assert isinstance(store, Store)
    assert store.atomic
    assert update.outer


def test_approximations_only_where_they_are_rounded(plans: dict[str, tuple[Plan, list[Tensor]]]) -> None:
    assert "tp.coarse_div(" in render_triton(plans["softmax"][0]).source
    assert "tp.coarse_exp(" in render_triton(plans["softmax"][0]).source  # their sum is as near as they are
    assert "tp.coarse_" not in render_triton(plans["log softmax"][0]).source
    assert "tp.coarse_" not in render_triton(plans["softmax of few rows"][0]).source


@pytest.mark.parametrize(
    "name", ["layer norm backward", "group norm", "cross entropy", "index add", "max pool", "softmax"]
)
def test_compiles_for_sm90(plans: dict[str, tuple[Plan, list[Tensor]]], name: str, tmp_path: Path) -> None:
    for kernel in render_triton(plans[name][0]).kernels.values():
        binary = compile_job(cuda.job_of(kernel, 90), tmp_path)
        assert binary.cubin[:4] == b"\x7fELF"
