"""Activation memory budgets: the measured peak of a training step falls with the budget, is the planned one, and gradients stay right."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from opforge.errors import ConfigError
from opforge.runtime import config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.schedule.planned import planned_peak
from opforge.runtime.training import split

WIDTH, ROWS, MARK = 32, 512, 1234577


def blocks(x: Tensor, *weights: Tensor) -> Tensor:
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + F.gelu(F.layer_norm(x, (WIDTH,)) @ up) @ down
    return x.square().mean()


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(ROWS, WIDTH), *[(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * 3]
    return [torch.randn(s).mul_(0.3).requires_grad_() for s in shapes]


def measured(f: Any, args: list[Tensor]) -> int:
    """Bytes that torch's allocator hands out at most at once in the third step, by a thread without an arena of earlier runs."""

    def work() -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            for k in range(3):
                if k == 2:
                    torch.empty(MARK, dtype=torch.uint8)
                torch.autograd.grad(f(*args), args)
        sizes = [e.nbytes() for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
        start = sizes.index(MARK)
        alive = peak = sum(sizes[:start])
        for size in sizes[start + 2 :]:
            alive += size
            peak = max(peak, alive)
        return peak

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def planned(budget: float) -> int:
    args = inputs()
    with config.patch(activation_memory_budget=budget) as cfg:
        parts = split(trace(blocks, args, training=True), cfg)
        kept = {
            k
            for k, s in enumerate(parts.backward.saved)
            if s.place[0] == "output" and s.place[1] >= parts.backward.results
        }
        found = planned_peak(parts.forward, parts.backward.graph, kept, cfg)
    assert found is not None
    return found


def test_measured_peaks_fall_with_the_budget() -> None:
    args = inputs()
    want = torch.autograd.grad(blocks(*args), args)
    wide = [t.detach().double().requires_grad_() for t in args]
    exact = torch.autograd.grad(blocks(*wide), wide)
    peaks = []
    for budget in (1.0, 0.6, 0.3, 0.0):
        torch._dynamo.reset()
        options = {"activation_memory_budget": budget, "opt_level": "0", "strict": True}
        f = torch.compile(blocks, backend="opforge", dynamic=False, options=options)
        for g, w, e in zip(torch.autograd.grad(f(*args), args), want, exact, strict=True):
            floor = torch.finfo(torch.float32).eps * float(e.abs().max())
            assert float((g - e).abs().max()) <= max(2 * float((w - e).abs().max()), floor)
        peaks.append(measured(f, args))
        assert abs(peaks[-1] - planned(budget)) <= 4096  # scalars, and the arena's alignment
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.7 * peaks[0]


def test_the_default_policy_keeps_more() -> None:
    def kept(policy: str) -> int:
        with config.patch(partition=policy) as cfg:
            parts = split(trace(blocks, inputs(), training=True), cfg)
        (end,) = (n for n in parts.forward.graph.nodes if n.op == "output")
        return sum(n.meta["val"].untyped_storage().nbytes() for n in end.args[0][parts.backward.results :])

    assert kept("default") > kept("min_cut")


@pytest.mark.parametrize("budget", [1.5, -1, "2", True])
def test_a_budget_outside_of_zero_to_one_is_refused(budget: object) -> None:
    with (
        pytest.raises(ConfigError, match="expected a number from 0 to 1"),
        config.patch(activation_memory_budget=budget),
    ):
        raise AssertionError("accepted")
