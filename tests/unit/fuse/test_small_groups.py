"""Small groups over the same points are one kernel on a GPU, where values pass within a point and no larger value lives longer for it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from opforge.generated.rewrites import RULES
from opforge.runtime.check.plan import check
from opforge.runtime.compile_fx import written_inside
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.graph.rewrite import rewrite
from opforge.runtime.kernels.plan import CopyStep, ExternStep, KernelStep, Plan
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.targets.cuda import prepared, scheduled
from tests.support.gpu_plan import planned
from tests.support.machines import H200
from tests.support.scripts import importable


def kernels(plan: Plan) -> int:
    return sum(isinstance(s, KernelStep) for s in plan.steps)


def gates(x: Tensor, c: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """What a cell's backward computes again, of parts of one tensor, and what is made of it."""
    i, f, o = torch.sigmoid(x[:, :32]), torch.sigmoid(x[:, 32:64]), torch.sigmoid(x[:, 96:])
    t = torch.tanh(x[:, 64:96])
    return i, f, o, t, g * o * (1 - torch.tanh(c).square()) + i * t, f * c


def after_a_product(x: Tensor, c: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """The first value waits for the product, the second does not, and the third reads both."""
    a = g + x[:, :32] @ c[:32]
    b = torch.sigmoid(x[:, 64:96])
    return a, b, a * b


def apart(x: Tensor, c: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Nothing is read by both."""
    return torch.sigmoid(c), torch.tanh(g)


def shifted(x: Tensor, c: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """The second reads other points of the first."""
    a = torch.sigmoid(c) * g
    return a, torch.tanh(a.flip(0) + x[:, :32]) * x[:, 32:64]


def inputs(rows: int = 64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, 128), torch.randn(rows, 32), torch.randn(rows, 32)]


@pytest.mark.parametrize(("fn", "count"), [(gates, 1), (after_a_product, 1), (apart, 2), (shifted, 2)])
def test_how_many_kernels(fn: Callable[..., tuple[Tensor, ...]], count: int) -> None:
    assert kernels(planned(fn, inputs())) == count


def test_a_recurrent_training_step() -> None:
    """24 steps of an LSTM cell: one kernel beside each product forward, two backward; without joining there are 168."""

    with importable():
        from programs.models import LSTMLoop

        model = LSTMLoop()
    names, parameters = zip(*model.named_parameters(), strict=True)

    def step(xs: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        found = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (xs,))
        return torch.autograd.grad(found.square().mean(), parameters)

    traced = trace(step, [torch.randn(24, 16, 64), *parameters])
    rewrite(traced.graph, RULES, device="cuda")
    program = prepared(separate_outputs(lower(traced.graph).program), H200)
    plan = scheduled(program, Config(), H200)
    check(program, plan)
    assert kernels(plan) == 97
    assert sum(isinstance(s, ExternStep) for s in plan.steps) == 96


def test_large_ones_stay_apart() -> None:
    assert kernels(planned(gates, inputs(1 << 14))) > 1


def test_partial_results_do_not_wait_for_the_last() -> None:
    """A sum of products adds up as they come: all of them at once would take their memory."""

    def total(*given: Tensor) -> Tensor:
        found = F.relu(given[0] @ given[1])
        for a, b in zip(given[2::2], given[3::2], strict=True):
            found = torch.tanh(found) * 0.5 + a @ b
        return found

    given = [torch.randn(128, 128) for _ in range(24)]
    plan = planned(total, given)
    assert kernels(plan) == 6  # of two sums each
    assert plan.arena_bytes <= 4 * 128 * 128 * 4


def a_program(seed: int) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    """A random graph of small values: element by element, by parts, turned, beside products and sums."""

    def run(x: Tensor, c: Tensor, g: Tensor) -> list[Tensor]:
        choose = random.Random(seed)
        made = [c, g, *(x[:, k : k + 32] for k in (0, 32, 64, 96))]
        for _ in range(choose.randint(6, 20)):
            a, b = choose.choice(made), choose.choice(made)
            made.append(
                choose.choice(
                    [
                        lambda a, b: torch.sigmoid(a) * b,
                        lambda a, b: torch.tanh(a + b),
                        lambda a, b: a - b.sum(1, keepdim=True).mul(0.01),
                        lambda a, b: (a @ b[:32]).mul(0.1),
                        lambda a, b: a.flip(0) + b,
                        lambda a, b: torch.cat([a[:, 16:], b[:, :16]], 1),
                        lambda a, b: torch.where(a > b, a, b.roll(1, 1)),
                    ]
                )(a, b)
            )
        return [t for t in made[6:] if choose.random() < 0.5] + [made[-1] * 2]

    return run


@pytest.mark.parametrize("seed", range(40))
def test_plans_of_random_graphs_are_right(seed: int) -> None:
    """The checker of plans proves each value at each point (`planned`)."""
    planned(a_program(seed), inputs())


def test_a_slice_of_a_large_value_does_not_keep_it() -> None:
    """The first row of each layer is needed at the end; it is stored, not made there of what would have to stay."""

    def layers(x: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
        h, rows = x, []
        for _ in range(8):
            h = h @ w
            rows.append(torch.tanh(h[0]))
        s = h.mean(0) @ v
        return [t for r in rows for t in (r, torch.sigmoid(r * s))]

    assert planned(layers, [torch.randn(512, 512) for _ in range(3)]).arena_bytes <= 2 * 512 * 512 * 4


def test_a_value_that_others_keep_is_not_freed_by_an_earlier_reader() -> None:
    def twice(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        h, kept = x, []
        for _ in range(8):
            kept.append(h @ w)
            h = torch.sigmoid(kept[-1][:, :256]) @ u.t()
        for e in kept:
            h = h @ (e.t() @ e)
        for e in kept:
            h = (torch.tanh(e[:, 256:]) @ u.t() + h) @ w
        return h

    given = [torch.randn(128, 512), torch.randn(512, 512), torch.randn(512, 256)]
    matrix = 128 * 512 * 4
    assert (
        planned(twice, given).arena_bytes <= (8 + 4 + 4) * matrix
    )  # those that are kept, a square, and what is beside them


def test_inputs_are_still_written_in_place() -> None:
    def step(y: Tensor, *xs: Tensor) -> list[Tensor]:
        out = []
        for x in xs:
            out.append(x.flip(0) * torch.sigmoid(y[:, 8:16]))
            x.add_(torch.sigmoid(y[:, :8]))
        return out

    given = [torch.randn(8, 16), *(torch.randn(8, 8) for _ in range(4))]
    with torch.no_grad():
        traced = trace(step, given)
    program = prepared(separate_outputs(lower(traced.graph, written_inside(traced)).program), H200)
    plan = scheduled(program, Config(), H200)
    check(program, plan)
    assert not [s for s in plan.steps if isinstance(s, CopyStep)]


def test_a_sum_beside_an_indexed_update() -> None:
    def update(a: Tensor, b: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(a).scatter_add(1, i, b), b.sum()

    planned(update, [torch.randn(4, 4), torch.randn(4, 4), torch.zeros(4, 4, dtype=torch.long)])
