"""Routines as kernels of a GPU: sorts, selections and running extremes of rows that fit into registers. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.machines import H200

pytest.importorskip("triton")

from opforge.runtime.build.triton_job import compile_job
from opforge.runtime.config import Config
from opforge.runtime.kernels.plan import Plan
from opforge.runtime.kernels.routines import routines_of
from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.targets.block_trials import trials_of
from opforge.runtime.targets.cuda import job_of, prepared, scheduled
from opforge.runtime.tile.routines import routine_blocks
from tests.support.sorting_interpreted import DTYPES, WHOLE, check_interpreted
from tests.unit.lower.test_gpu import externs, lowered


def everything(x: Tensor) -> Any:
    return x.sort(1), x.sort(dim=0, stable=True, descending=True), x.topk(3), x.topk(1, largest=False), x.cummax(0)


def plan(fn: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float32) -> Plan:
    return scheduled(prepared(lowered(fn, shape, dtype=dtype), H200), Config(), H200)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_equal_to_a_stable_sort(dtype: str) -> None:
    check_interpreted(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_to_a_stable_sort_in_all_shapes(dtype: str) -> None:
    check_interpreted(dtype, WHOLE)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8", "int32"])
def test_kernels_compile(dtype: str, tmp_path: Path) -> None:
    unit = render_triton(plan(everything, 60, 40, dtype=getattr(torch, dtype)))
    assert len(unit.kernels) == 5
    for kernel in unit.kernels.values():
        compile_job(job_of(kernel, 90), tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_short_sorts_as_eager_has_them_compile(dtype: str, tmp_path: Path) -> None:
    unit = render_triton(plan(lambda x: (x.sort(1), x.sort(0)), 20, 5, dtype=getattr(torch, dtype)))
    assert len(unit.kernels) == 2
    for kernel in unit.kernels.values():
        compile_job(job_of(kernel, 90), tmp_path)


def test_the_longest_rows_compile(tmp_path: Path) -> None:
    unit = render_triton(plan(lambda x: (x.sort(), x.topk(600), x.cummin(0)), 4096, 1024, dtype=torch.float16))
    for kernel in unit.kernels.values():
        compile_job(job_of(kernel, 90), tmp_path)


def test_what_does_not_fit_is_eagers() -> None:
    program = lowered(lambda x: (x.topk(3), x.double().sort(0), x.t().cummax(0)), (5, 5000), dtype=torch.float32)
    assert externs(program) == ["aten.topk.default", "aten.sort.default", "aten.cummax.default"]
    assert externs(lowered(torch.sort, (5, 257), dtype=torch.float32)) == ["aten.sort.default"]
    assert externs(lowered(torch.sort, (5, 257))) == ["routine.sorting.sort"]
    assert externs(lowered(lambda x: x.sort(0), (65, 5), dtype=torch.float32)) == ["aten.sort.default"]
    assert externs(lowered(lambda x: x.sort(0), (64, 5), dtype=torch.float32)) == ["routine.sorting.sort"]


def test_neighbours_in_memory_are_read_together() -> None:
    (along,) = routines_of(plan(lambda x: x.sort(), 4096, 128))
    (across,) = routines_of(plan(lambda x: x.sort(0), 128, 64, dtype=torch.int16))
    assert routine_blocks(along, H200.tuning.routine) == (8, 128, 4)
    assert routine_blocks(across, H200.tuning.routine) == (16, 128, 8)
    (few,) = routines_of(plan(lambda x: x.sort(), 30, 128))
    assert routine_blocks(few, H200.tuning.routine) == (1, 128, 4)


def test_equal_calls_are_one_kernel() -> None:
    unit = render_triton(plan(lambda x: ((x + 1).sort(), (x * 2).sort()), 64, 32))
    assert sum("routine.sort" in k.source for k in unit.kernels.values()) == 1
    assert sum(name.startswith("sort") for name in unit.symbols) == 2


def test_blocks_of_a_routine_are_not_measured() -> None:
    """`max-autotune` of a graph with a sort: its other kernels are."""
    made = plan(lambda x: (x * 2).sort(), 64, 32)
    found = dict(trials_of(made, render_triton(made)))
    assert sum(work == "a routine has blocks of its own" for work in found.values()) == 1
    assert len(found) == 2
