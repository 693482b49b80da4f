"""Compile-time passes stay near-linear in the size of the graph: the exponent is measured, not assumed."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from typing import Any

import pytest
import torch

from opforge.generated.scalars import SCALARS
from opforge.runtime.check.plan import check
from opforge.runtime.ir.nodes import Program
from opforge.runtime.ir.text import dump
from opforge.runtime.ir.verify import verify
from opforge.runtime.lower.language import scalar_ops as s
from opforge.runtime.render.cpp_unit import render_unit
from opforge.runtime.schedule.draft import Options
from opforge.runtime.schedule.pipeline import schedule
from tests.support.loops import pointwise, program_of, reduce
from tests.support.machines import AVX2

SIZES = (64, 128, 256, 512)  # blocks; a block is four nests


def chain(blocks: int, kind: str) -> Program:
    def build(b: Any, x: Any, w: Any) -> Any:
        outs = []
        for k in range(blocks):
            y = pointwise(b, lambda a, c: s.mul(s.tanh(a), c), x, w)
            if kind == "layers":  # normalized by a row statistic, with a residual
                m = reduce(b, "sum", y, -1, True)
                x = pointwise(b, lambda a, c, d: s.add(s.sub(a, c), d), y, m, x)
            elif kind == "inlined":  # values of one use each: a single body that grows by every step
                x = pointwise(b, lambda a: s.add(s.mul(a, 1.0001), 0.5), pointwise(b, lambda a, c: s.add(a, c), y, w))
            elif kind == "recurrent":  # many small kernels that all read one weight
                x = pointwise(b, lambda a, c: s.add(a, c), y, x)
                if k % 8 == 0:
                    outs.append(x)
            else:  # wide: independent results of one input
                outs.append(pointwise(b, lambda a, n=float(k): s.mul(a, n), y))
        return (x, *outs) if kind != "wide" else tuple(outs)

    return program_of(build, [torch.empty(16, 32), torch.empty(32)])


def seconds(program: Program) -> dict[str, float]:
    found = {}
    clock = time.process_time()

    def lap(name: str) -> None:
        nonlocal clock
        now = time.process_time()
        found[name], clock = now - clock, now

    verify(program)
    lap("verify")
    plan = schedule(program, Options(costs=lambda op: SCALARS[op].cost if op in SCALARS else 1))
    lap("schedule")
    schedule(program, Options(minimize_memory=True))
    lap("schedule of a training half")
    check(program, plan)
    lap("check")
    dump(program)
    lap("dump")
    render_unit(plan, AVX2, threads=2, threshold=1000)
    lap("codegen")
    return found


@pytest.mark.parametrize("kind", ["layers", "inlined", "recurrent", "wide"])
def test_passes_are_near_linear(kind: str) -> None:
    programs = [chain(n, kind) for n in SIZES]
    best = [seconds(p) for p in programs]
    for _ in range(12):  # other work on the machine only adds time: the least of a few is nearest the truth
        gc.collect()
        gc.disable()  # a full collection walks the whole process's heap, and falls into whichever pass allocates the most
        try:
            again = [seconds(p) for p in programs]
        finally:
            gc.enable()
        best = [{stage: min(t, new[stage]) for stage, t in old.items()} for old, new in zip(best, again, strict=True)]
        growth = {stage: exponent([t[stage] for t in best]) for stage in best[0]}
        if max(growth.values()) < 1.35:
            return
    stage = max(growth, key=growth.__getitem__)
    pytest.fail(f"{stage} grows as n^{growth[stage]:.2f} on {kind!r}: {[t[stage] for t in best]} s")


def exponent(times: list[float]) -> float:
    """Of the growth with size: the median slope of all pairs of sizes, which one disturbed size does not decide (Theil and Sen). What takes
    less than 5 ms counts as that.
    """
    points = [(math.log(n), math.log(max(t, 5e-3))) for n, t in zip(SIZES, times, strict=True)]
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2))
