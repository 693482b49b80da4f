"""Times the kernel of each program of benchmarks/attention.py on a CUDA device with other blocks than it would get: what the rules for attention
in specs/tuning are taken from.

    python benchmarks/attention_blocks.py                    everything
    python benchmarks/attention_blocks.py --only causal      the programs whose name contains "causal"
    python benchmarks/attention_blocks.py --compile          no device: compiles all of them for `sm_90`, and says which do not

A kernel runs by itself, on random numbers. µs of the fastest of all rounds, in turns; a configuration is rows x columns x warps x stages.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from opforge.generated.targets import GPU_TARGETS
from opforge.runtime.machine import Gpu

sys.path.insert(0, str(Path(__file__).parent))

import attention
from attention import PROGRAMS, Attention
from compared import chosen

from opforge.errors import BuildError
from opforge.generated.rewrites import RULES
from opforge.runtime.build.triton_job import Binary
from opforge.runtime.build.triton_pool import compile_kernels
from opforge.runtime.config import Config, current
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.graph.rewrite import rewrite
from opforge.runtime.kernels.plan import Plan
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.machine import MEASURED
from opforge.runtime.render.triton_unit import TritonKernel, render_triton
from opforge.runtime.targets.autotune import Task, Trial
from opforge.runtime.targets.block_trials import trials_of
from opforge.runtime.targets.cuda import capability, job_of, prepared, scheduled
from opforge.runtime.targets.cuda_timer import CudaTimer

console = Console(stderr=True)
H200 = Gpu(GPU_TARGETS["sm_90"], num_sms=132)
CALLS = 10  # of a kernel in a sample
SHOWN = 8
BLOCKS = (
    (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 64, 8), (128, 128, 8), (64, 32, 4), (128, 32, 4), (128, 32, 8),
)  # fmt: skip
STAGES = (2, 3, 4)
_STAGES = re.compile(r"num_stages=\d+")


def named(one: TritonKernel) -> str:
    """rows x columns x warps x stages."""
    stages = _STAGES.findall(one.source)[0].removeprefix("num_stages=")
    return f"{one.xblock} x {one.rblock} x {one.warps} x {stages}"


class Traced(Exception):
    """The program's graph was taken: nothing is to be run."""


def trial_of(program: Attention) -> Trial | None:
    """The kernel with the products of a program, in all configurations; first its own."""
    plans: list[Plan] = []

    def keep(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        traced = trace(gm, inputs)
        rewrite(traced.graph, RULES, device="cuda")
        lowered = prepared(separate_outputs(lower(traced.graph, device=attention.DEVICE).program), H200)
        plans.append(scheduled(lowered, Config(), H200))
        raise Traced

    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(program.fn, backend=keep, fullgraph=True, dynamic=False)(*program.inputs())
    except Exception:  # Dynamo's own, with ours inside
        if not plans:
            raise
    (plan,) = plans
    parts = {k.name for k in plan.kernels() if k.parts}
    for name, trial in trials_of(plan, render_triton(plan), positions=True):
        if name in parts and isinstance(trial, Trial):
            return replace(trial, configurations=tuple(configurations(trial.kernel)))
    return None


def configurations(own: TritonKernel) -> Iterator[TritonKernel]:
    yield own
    for x, r, warps in BLOCKS:
        for stages in STAGES:
            source = _STAGES.sub(f"num_stages={stages}", own.source)
            one = replace(own, source=source, xblock=x, rblock=r, warps=warps)
            if named(one) != named(own):
                yield one


def times_of(trial: Trial, binaries: Sequence[Binary | BuildError], timer: CudaTimer, rounds: int) -> dict[str, float]:
    """µs of each configuration that runs."""
    found: dict[str, float] = {}
    with timer.bench(Task((trial,))) as bench:
        runs = {}
        for one, binary in zip(trial.configurations, binaries, strict=True):
            if isinstance(binary, BuildError):
                continue
            try:
                runs[named(one)] = bench.load(trial, one, binary)
            except (BuildError, RuntimeError) as error:  # the device does not take it
                console.print(f"{named(one)}: {error}")
        for _ in range(rounds):
            for name, run in runs.items():
                found[name] = min(found.get(name, 1e9), bench.time(run, CALLS))
    return found


def main(
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved samples")] = 3,
    out: Annotated[Path | None, typer.Option(help="file for all times, as JSON")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="compile only; needs no device")] = False,
) -> None:
    """Blocks of attention kernels, timed."""
    if not compiled and not torch.cuda.is_available():
        console.print("[red]there is no CUDA device")
        raise typer.Exit(2)
    if compiled:
        attention.DEVICE = "cpu"
    gpu = MEASURED if compiled else capability(torch.cuda.current_device())
    trials = {p.name: trial for p in chosen(PROGRAMS, only) if (trial := trial_of(p)) is not None}
    jobs = [job_of(one, gpu) for trial in trials.values() for one in trial.configurations]
    console.print(f"{len(trials)} kernels, {len(jobs)} configurations")
    binaries = iter(compile_kernels(jobs, current()))
    rows: dict[str, dict[str, float]] = {}
    for name, trial in trials.items():
        made = [next(binaries) for _ in trial.configurations]
        for one, binary in zip(trial.configurations, made, strict=True):
            if isinstance(binary, BuildError):
                console.print(f"{name}, {named(one)}: {str(binary)[:200]}")
        if compiled:
            continue
        rows[name] = times_of(trial, made, CudaTimer(torch.cuda.current_device()), rounds)
        own = named(trial.kernel)
        best = sorted(rows[name].items(), key=lambda item: item[1])[:SHOWN]
        print(
            f"{name:34} {own:>18} {rows[name].get(own, 0):8.1f}; " + ", ".join(f"{n} {us:.1f}" for n, us in best),
            flush=True,
        )
        if out is not None:
            out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
