"""Times every kernel of the memory-bound programs on a CUDA device with other blocks than it would get: what the tables of `specs/tuning` are
taken from.

    python benchmarks/tune.py                    everything
    python benchmarks/tune.py --only softmax     the programs whose name contains "softmax"
    python benchmarks/tune.py --table            and then the table of this GPU, with what its rules gain by it

A kernel runs by itself, on the program's inputs and on random numbers where another kernel would write. Its share is of the bandwidth of copies,
measured in the same run, for what it reads and writes. All configurations of all kernels are compiled first, side by side. Configurations,
memory and clock are those of `max_autotune` (`runtime/targets/tune.py`), which tries fewer.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from gpu import copy_bandwidth
from traffic import planned, traffic
from tune_table import Sample, table_text

from opforge.runtime.build.triton_pool import compile_kernels
from opforge.runtime.config import current
from opforge.runtime.kernels.plan import Kernel, Plan
from opforge.runtime.machine import tuning_of
from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.targets.autotune import Task, Trial, measured
from opforge.runtime.targets.block_trials import trials_of
from opforge.runtime.targets.cuda import capability, job_of
from opforge.runtime.targets.cuda_timer import CudaTimer
from opforge.runtime.tile.blocks import rule_of

from programs.memory_bound import BOUND, BoundProgram

console = Console(stderr=True)
SHOWN = 4  # configurations of a kernel that are printed


@dataclass(frozen=True)
class Timed:
    """One kernel of a program with the configurations that are tried."""

    program: BoundProgram
    plan: Plan
    kernel: Kernel
    trial: Trial


def timed_of(programs: list[BoundProgram], gpu: int) -> Iterator[Timed]:
    """The kernels that run by themselves; of those with equal text the first."""
    for program in programs:
        plan, _ = planned(program)
        kernels = {k.name: k for k in plan.kernels()}
        for name, trial in trials_of(plan, render_triton(plan, capability=gpu), wide=True, positions=True):
            if isinstance(trial, Trial) and trial.group is None:
                yield Timed(program, plan, kernels[name], trial)


def inputs_of(one: Timed) -> dict[str, torch.Tensor]:
    """The program's inputs by the names of their buffers, as their elements lie in memory."""
    inputs = [make(torch.device("cuda")) for make in one.program.inputs]
    given = {}
    for b, t in zip(one.plan.inputs, inputs, strict=False):
        if isinstance(t, torch.Tensor) and b.name in one.trial.memory:
            given[b.name] = t.as_strided((one.trial.memory[b.name].elements,), (1,), 0)
    return given


def main(
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved samples")] = 5,
    out: Annotated[Path | None, typer.Option(help="file for all times, as JSON")] = None,
    table: Annotated[bool, typer.Option("--table", help="print an entry of specs/tuning for this GPU")] = False,
) -> None:
    """Blocks of Triton kernels, timed."""
    if not torch.cuda.is_available():
        console.print("[red]there is no CUDA device")
        raise typer.Exit(2)
    gpu = capability(torch.cuda.current_device())
    tuning, timer = tuning_of(gpu), CudaTimer(torch.cuda.current_device())
    wanted = [w.strip() for w in (only or "").split(",") if w.strip()]
    found = list(timed_of([p for p in BOUND.values() if not wanted or any(w in p.name for w in wanted)], gpu))
    jobs = [job_of(one, gpu) for t in found for one in t.trial.configurations]
    console.print(f"{len(found)} kernels, {len(jobs)} configurations")
    binaries = iter(compile_kernels(jobs, current()))
    bandwidth = copy_bandwidth()
    rows: list[dict[str, Any]] = []
    samples: list[Sample] = []
    for t in found:
        with timer.bench(Task((t.trial,)), inputs_of(t)) as bench:
            times = measured(t.trial, [next(binaries) for _ in t.trial.configurations], bench, rounds)
        if not times or times[0][0] is not t.trial.kernel:
            console.print(f"{t.program.name} {t.kernel.name}: its own configuration does not run")
            continue
        samples.append(Sample(t.trial.shape, rule_of(t.trial.shape, tuning), times))
        reads, writes, _ = traffic(t.kernel, t.plan.layouts, t.trial.shape)
        moved = reads.total() + writes.total()
        named = [(f"{k.xblock} x {k.rblock} x {k.warps}", moved / us * 1e6 / bandwidth) for k, us in times]
        best = sorted(named, key=lambda n: -n[1])[:SHOWN]
        print(
            f"{t.program.name:20} {t.kernel.name[:30]:30} {named[0][0]:>16} {named[0][1]:.2f}; best "
            + ", ".join(f"{name} {share:.2f}" for name, share in best)
        )
        rows.append({"program": t.program.name, "kernel": t.kernel.name, "moved": moved, "shares": dict(named)})
        if out is not None:
            out.write_text(json.dumps(rows, indent=1) + "\n")
    if table:
        print(table_text(tuning, samples, gpu))


if __name__ == "__main__":
    typer.run(main)
