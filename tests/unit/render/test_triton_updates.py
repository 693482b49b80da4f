"""Indexed updates as Triton kernels: points in any order, in the memory of the input that is updated. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opforge.runtime.kernels.plan import CopyStep, Plan
from opforge.runtime.kernels.steps import allocation_root
from opforge.runtime.render.triton_unit import render_triton

pytest.importorskip("triton")

from tests.support.gpu_plan import planned
from tests.support.triton_run import compile_sm90, job_of, launch_interpreted


def copied(c: Tensor, p: Tensor, k: Tensor) -> None:
    c.index_copy_(2, p, k)


def assigned(c: Tensor, p: Tensor, k: Tensor) -> Tensor:
    c[:, :, p] = k * 2 + 1
    return c.sum(-1)


def both(c: Tensor, p: Tensor, k: Tensor, v: Tensor) -> None:
    """What one layer of a decoder does with its caches."""
    c.index_copy_(2, p, k)
    v[:, :, p] = -k


def twice(c: Tensor, p: Tensor, k: Tensor) -> Tensor:
    c.index_copy_(2, p, k)
    c.index_fill_(2, p + 1, 3.0)
    return c.amax(-1)


def added(c: Tensor, p: Tensor, k: Tensor) -> None:
    c.index_add_(2, p, k)


def scattered(c: Tensor, p: Tensor, k: Tensor) -> None:
    c.scatter_(2, p[None, None, :, None].expand(k.shape), k)


def fresh(c: Tensor, p: Tensor, k: Tensor) -> Tensor:
    return c.index_copy(2, p, k)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def inputs(dtype: torch.dtype, positions: int = 3) -> list[Tensor]:
    at = torch.arange(positions) * 7 + 2
    return [rand(2, 3, 64, 8, dtype=dtype), at, rand(2, 3, positions, 8, dtype=dtype)]


HALF, FLOAT = torch.bfloat16, torch.float32
CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "index_copy": (copied, inputs(HALF)),
    "index_copy of one position": (copied, inputs(HALF, 1)),
    "index_put": (assigned, inputs(FLOAT)),
    "two caches": (both, [*inputs(HALF, 1), rand(2, 3, 64, 8, dtype=HALF) + 1]),
    "twice": (twice, inputs(FLOAT)),
    "index_add": (added, inputs(FLOAT)),
    "scatter": (scattered, inputs(FLOAT)),
    "transposed": (copied, [inputs(HALF)[0].transpose(1, 2).contiguous().transpose(1, 2), *inputs(HALF)[1:]]),
    "a fresh result": (fresh, inputs(HALF)),
}


@pytest.fixture(scope="module")
def ran() -> dict[str, tuple[Plan, dict[str, Tensor]]]:
    """Every case in one process of Triton's interpreter."""
    plans = {name: planned(f, given, writes=True) for name, (f, given) in CASES.items()}
    memories = launch_interpreted([job_of(plan, CASES[name][1]) for name, plan in plans.items()])
    return {name: (plans[name], memory) for name, memory in zip(plans, memories, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_inputs_have_eagers_new_contents(ran: dict[str, tuple[Plan, dict[str, Tensor]]], name: str) -> None:
    plan, memory = ran[name]
    f, given = CASES[name]
    want = [t.clone() for t in given]
    result = f(*want)
    for b, t in zip(plan.inputs, want, strict=True):
        assert torch.equal(memory[b.name].as_strided(t.shape, t.stride()), t)
    shown = [
        memory[v.buffer].as_strided(v.shape, v.stride, v.offset)
        for v in plan.outputs
        if hasattr(v, "buffer") and v.buffer
    ]
    if result is not None:
        torch.testing.assert_close(shown[-1], result)
    assert not any(isinstance(step, CopyStep) for step in plan.steps)


@pytest.mark.parametrize("name", [n for n in CASES if n != "a fresh result"])
def test_kernels_go_through_the_new_elements_alone(ran: dict[str, tuple[Plan, dict[str, Tensor]]], name: str) -> None:
    plan, _ = ran[name]
    for k in plan.kernels():
        inside = [b for b in k.writes if plan.allocations[allocation_root(plan, b)].kind == "input"]
        points = 1
        for v in (*k.outer, *k.phases[0].inner):
            points *= int(v.extent)
        assert not inside or points <= CASES[name][1][2].numel()


def test_updates_of_two_caches_are_one_launch(ran: dict[str, tuple[Plan, dict[str, Tensor]]]) -> None:
    plan, _ = ran["two caches"]
    assert len(render_triton(plan).grouped) == 0  # they store different values
    same = planned(
        lambda c, p, k, v: (c.index_copy_(2, p, k), v.index_copy_(2, p, k))[2:], CASES["two caches"][1], writes=True
    )
    assert len(render_triton(same).grouped) == 2


@pytest.mark.parametrize("name", CASES)
def test_compiles_for_sm90(ran: dict[str, tuple[Plan, dict[str, Tensor]]], name: str) -> None:
    plan, _ = ran[name]
    for k in plan.kernels():
        assert compile_sm90(k, plan.layouts)[:4] == b"\x7fELF"


def doubled_at_arange(c: Tensor) -> None:
    p = torch.arange(5)
    c.index_copy_(0, p, c.index_select(0, p) * 2)


def doubled_at_one_place(c: Tensor) -> None:
    p = torch.zeros(1500, dtype=torch.int64)
    c[p] = c[p] * 2


@pytest.mark.parametrize("f", [doubled_at_arange, doubled_at_one_place])
def test_every_point_reads_the_old_contents(f: Callable[..., Any]) -> None:
    """An update with positions that are known was computed in the memory of the input that it reads: all but the first program that came to a
    row read what another had doubled.
    """
    c = rand(9, 2)
    plan = planned(f, [c], writes=True)
    (memory,) = launch_interpreted([job_of(plan, [c])])
    (copy,) = (step for step in plan.steps if isinstance(step, CopyStep))
    want = c.clone()
    f(want)
    assert torch.equal(memory[copy.source].view(9, 2), want)
