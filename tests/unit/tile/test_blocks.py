"""Block sizes out of the tables, and those next to them: none changes what a kernel computes. By Triton's interpreter; needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.machines import H200

pytest.importorskip("triton")

from opforge.generated.targets import GPU_TARGETS
from opforge.generated.tuning import TUNING
from opforge.runtime import machine
from opforge.runtime.machine import tuning_of
from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.targets.autotune import Trial
from opforge.runtime.targets.block_trials import trials_of
from opforge.runtime.tile.blocks import blocks, kind_of, most_points, neighbours
from opforge.runtime.tile.launch import Launch, launch
from tests.support.gpu_plan import planned
from tests.support.triton_run import Job, job_of, launch_interpreted, results


def half(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]]]] = {
    "pointwise": (lambda x, y: (x * y).tanh(), lambda: [torch.randn(40, 100), torch.randn(100)]),
    "branches": (lambda x, y: torch.cat([x * 2, y], 1), lambda: [torch.randn(2, 512), torch.randn(2, 1024)]),
    "transpose": (lambda x, y: x.t() + y, lambda: [torch.randn(96, 64), torch.randn(64, 96)]),
    "outer_reduction": (lambda x: x / x.sum(0), lambda: [torch.rand(100, 70)]),
    "looped_outer_reduction": (lambda x: x.sum(0), lambda: [torch.rand(1100, 24)]),
    "persistent_reduction": (lambda x: x / x.sum(-1, keepdim=True), lambda: [torch.rand(30, 100)]),
    "looped_reduction": (lambda x: x.sum(-1), lambda: [torch.rand(2, 17000)]),
    "multi_pass_reduction": (lambda x: x / x.sum(-1, keepdim=True), lambda: [torch.rand(2, 17000).double()]),
    "product": (
        lambda x, q, s: torch.relu(x @ (q.to(x.dtype) * s[:, None])),
        lambda: [half(9, 70), torch.randint(-128, 128, (70, 130), dtype=torch.int8), torch.rand(70).bfloat16() / 64],
    ),
}


@dataclass
class Ran:
    trial: Trial
    got: dict[tuple[int, int], Tensor]


def extremes(trial: Trial) -> list[tuple[int, int]]:
    """Tiles to run: that of the table, and those with the fewest and the most points, or steps. (The interpreter takes its time.)"""
    tiles = [(one.xblock, one.rblock) for one in trial.configurations]
    return list(dict.fromkeys([tiles[0], min(tiles), max(tiles), *(f(tiles, key=lambda t: t[1]) for f in (min, max))]))


@pytest.fixture(scope="module")
def ran() -> dict[str, Ran]:
    """Every case with its tiles, in one process of the interpreter."""
    torch.manual_seed(0)
    found: dict[str, Ran] = {}
    jobs: list[tuple[str, tuple[int, int], Job, Any]] = []
    for name, (fn, make) in CASES.items():
        inputs = make()
        plan = planned(fn, inputs, num_sms=0)
        trials = [t for _, t in trials_of(plan, render_triton(plan)) if isinstance(t, Trial)]
        trial = trials[0]
        assert kind_of(launch(plan.kernels()[0], plan.layouts)) == name.replace("branches", "pointwise")
        found[name] = Ran(trial, {})
        assert len(plan.kernels()) == 1
        for tile in extremes(trial):
            jobs.append((name, tile, replace(job_of(plan, inputs), tile=tile), plan))
    memories = launch_interpreted([job for _, _, job, _ in jobs])
    for (name, tile, _, plan), memory in zip(jobs, memories, strict=True):
        (found[name].got[tile],) = results(plan, memory)
    return found


@pytest.mark.parametrize("name", CASES)
def test_all_tiles_compute_the_same(ran: dict[str, Ran], name: str) -> None:
    first, *others = ran[name].got.values()
    assert others
    for got in others:
        torch.testing.assert_close(got, first, rtol=1e-2 if got.dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_no_block_lies_across_branches(ran: dict[str, Ran]) -> None:
    trial = ran["branches"].trial
    assert "tl.static_assert(512 % XBLOCK == 0)" in trial.kernel.source
    assert {one.xblock for one in trial.configurations} == {512, 256}


def test_limits_of_neighbours() -> None:
    rows = Launch(H200, 1000, 100, True)
    assert {r for _, r, _ in neighbours(blocks(rows), rows, 1 << 30, wide=True)} == {128}  # whole rows
    few = Launch(H200, 3, 1, True)
    assert {x for x, _, _ in neighbours(blocks(few), few, 1 << 30)} == {4}  # no more than there are
    long = Launch(H200, 10, 100000, False, passes=2, row=1 << 30, rows=3)
    assert blocks(long) == (1, 4096, 32)
    assert neighbours(blocks(long), long, 1 << 30)[0] == (1, 4096, 32)
    for x, r, w in neighbours(blocks(long), long, 1 << 30, wide=True):
        assert 32 * w <= x * r <= H200.budgets.tile
        assert w <= 32
    product = Launch(H200, 50304 * 2, 768, False, product=128)
    assert {x for x, _, _ in neighbours(blocks(product), product, 1 << 30)} == {64, 128}
    assert {r for _, r, _ in neighbours(blocks(product), product, 1 << 30)} == {32, 64, 128}


def test_costly_points_are_spread_and_long_code_is_for_few_elements() -> None:
    cheap, costly, long = (Launch(H200, 2048, 1, False, bytes=2, cost=cost) for cost in (10, 100, 1000))
    assert [blocks(shape) for shape in (cheap, costly, long)] == [(1024, 1, 2), (64, 1, 1), (64, 1, 1)]
    cheap, costly, long = (replace(shape, outer=1 << 24) for shape in (cheap, costly, long))
    assert [blocks(shape) for shape in (cheap, costly, long)] == [(1024, 1, 2), (1024, 1, 2), (512, 1, 8)]
    assert [blocks(Launch(H200, 24, 1024, True, cost=cost)) for cost in (100, 1000)] == [(1, 1024, 2), (1, 1024, 16)]


def test_the_cost_of_a_kernel() -> None:
    """What two values have in common is computed once."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x)
        return y + 1, y * 2

    def found(f: Callable[..., Any]) -> float:
        plan = planned(f, [torch.randn(100)])
        (kernel,) = plan.kernels()
        return launch(kernel, plan.layouts).cost

    assert found(fn) == found(lambda x: fn(x)[0]) + 1


def test_a_gpu_without_a_table_takes_the_nearest() -> None:
    assert tuning_of(90).name == "sm_90"
    assert {tuning_of(t.capability).capability for t in GPU_TARGETS.values()} <= set(TUNING)
    assert tuning_of(75) is tuning_of(min(TUNING))
    assert tuning_of(120) is tuning_of(max(TUNING))


def test_the_nearest_and_of_two_the_older(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning_of.cache_clear()
    monkeypatch.setattr(machine, "TUNING", {80: "old", 90: "new", 100: "newer"})
    assert [tuning_of(c) for c in (70, 80, 86, 89, 90, 94, 95, 103)] == [
        "old", "old", "new", "new", "new", "new", "new", "newer",
    ]  # fmt: skip
    tuning_of.cache_clear()


def test_branches_end_at_blocks_of_the_table() -> None:
    assert [most_points(size, tuning_of(90)) for size in (1, 2, 4, 8)] == [2048, 1024, 512, 512]
