"""Compile-time passes stay near-linear in the size of the graph: the exponent is measured, not assumed."""

from __future__ import annotations

import gc
import math
import time
from typing import Any

import pytest
import torch

from opforge.generated.scalars import SCALARS
from opforge.runtime.codegen.unit import render_unit
from opforge.runtime.ir.nodes import Program
from opforge.runtime.ir.text import dump
from opforge.runtime.ir.verify import verify
from opforge.runtime.lower import scalar_ops as s
from opforge.runtime.schedule.check import check
from opforge.runtime.schedule.schedule import schedule
from tests.support.loops import pointwise, program_of, reduce

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
    plan = schedule(program, costs=lambda op: SCALARS[op].cost if op in SCALARS else 1)
    lap("schedule")
    check(program, plan)
    lap("check")
    dump(program)
    lap("dump")
    render_unit(plan, lanes=8, threads=2, threshold=1000)
    lap("codegen")
    return found


@pytest.mark.parametrize("kind", ["layers", "inlined", "recurrent", "wide"])
def test_passes_are_near_linear(kind: str) -> None:
    programs = [chain(n, kind) for n in SIZES]
    gc.collect()
    gc.disable()  # a full collection walks the whole process's heap, and falls into whichever pass allocates the most
    try:
        runs = [min((seconds(p) for _ in range(3)), key=lambda t: sum(t.values())) for p in programs]
    finally:
        gc.enable()
    for stage in runs[0]:
        first, last = runs[0][stage], runs[-1][stage]
        exponent = math.log(max(last, 1e-9) / max(first, 5e-3)) / math.log(SIZES[-1] / SIZES[0])
        print(f"{kind} {stage}: {[round(r[stage], 3) for r in runs]} s, exponent {exponent:.2f}")
        assert exponent < 1.35, f"{stage} grows as n^{exponent:.2f} on {kind!r}: {[r[stage] for r in runs]}"
