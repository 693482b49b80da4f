"""Times the kernels of an optimizer's step over many tensors on a CUDA device, with other blocks than they would get.

    python benchmarks/foreach.py                 tables of addresses, and trees of comparisons for groups of up to 32 tensors
    python benchmarks/foreach.py --only model    the shapes whose name contains "model"

All launches of a step are timed one after the other, by the clock of `max_autotune`; the share is that of the bandwidth of copies, measured in
the same run, for what a step reads and writes. The rules for `horizontal` and `horizontal_table` of `specs/tuning` are taken from it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from gpu import copy_bandwidth
from torch import Tensor

from opforge.errors import BuildError
from opforge.generated.rewrites import RULES
from opforge.generated.targets import Group
from opforge.runtime.build.triton_pool import compile_kernels
from opforge.runtime.compile_fx import written_inside
from opforge.runtime.config import current
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.graph.rewrite import rewrite
from opforge.runtime.kernels.plan import Plan
from opforge.runtime.lower.graph import lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.render.triton_unit import TritonKernel, render_triton
from opforge.runtime.targets.autotune import Task, Trial, measured
from opforge.runtime.targets.block_trials import trials_of
from opforge.runtime.targets.cuda import capability, gpu_of, job_of, prepared, scheduled
from opforge.runtime.targets.cuda_timer import CudaTimer

console = Console(stderr=True)
TREE = 32  # members of a group that a tree finds
Shapes = Sequence[tuple[int, ...]]


def model() -> Shapes:
    """Those of `adamw` in gpu_models.py."""
    shapes: list[tuple[int, ...]] = [(1024, 1024), (1024,), (1024,), (2048, 1024), (1024, 1024, 1, 1)] * 40
    shapes[::25] = [(4096, 1024)] * len(shapes[::25])
    return shapes


SHAPES: dict[str, Shapes] = {
    "model": model(),
    "memory_bound": [(512, 512)] * 200,
    "small": [(1024,), (64, 64), (256,)] * 100,
    "odd": [(511, 513)] * 200,
}


def adamw(*tensors: Tensor) -> None:
    """In place, with all that does not depend on a tensor left out."""
    n = len(tensors) // 4
    p, g, m, v = (list(tensors[k * n : (k + 1) * n]) for k in range(4))
    torch._foreach_mul_(p, 0.999)
    torch._foreach_lerp_(m, g, 0.1)
    torch._foreach_mul_(v, 0.999)
    torch._foreach_addcmul_(v, g, g, 0.001)
    torch._foreach_addcdiv_(p, m, torch._foreach_add(torch._foreach_sqrt(v), 1e-8), -1e-3)


def planned(fn: Callable[..., None], shapes: Shapes, table: bool) -> Plan:
    """`table`: as for any program; else groups are as large as `TREE`, and members are found by comparisons."""
    inputs = [torch.zeros(s, device="cuda") for _ in range(4) for s in shapes]
    with torch.no_grad():
        traced = trace(fn, inputs)
    rewrite(traced.graph, RULES, device="cuda")
    program = separate_outputs(lower(traced.graph, written_inside(traced), device="cuda").program)
    device = gpu_of(torch.cuda.current_device())
    if not table:
        costs = replace(device.costs, group=Group(tree=TREE, members=TREE))
        device = replace(device, target=replace(device.target, costs=costs))
    return scheduled(prepared(program, device), current(), device)


def configurations(one: TritonKernel, table: bool) -> Iterator[TritonKernel]:
    """That of the table first."""
    yield one
    for x in (256, 512, 1024, 2048):
        for r in (1, 2, 4, 8, 16) if table else (one.rblock,):
            for warps in (1, 2, 4, 8, 16):
                if 4 <= x // (32 * warps) <= 32 and (x, r, warps) != (one.xblock, one.rblock, one.warps):
                    yield replace(one, xblock=x, rblock=r, warps=warps)


def trials(plan: Plan, gpu: int, table: bool) -> list[Trial]:
    found = [trial for _, trial in trials_of(plan, render_triton(plan, capability=gpu))]
    for reason in {w for w in found if isinstance(w, str)}:
        console.print(f"not measured: {reason}")
    if not found:
        console.print(f"[red]no kernels in a plan of {len(plan.steps)} steps")
    return [replace(t, configurations=tuple(configurations(t.kernel, table))) for t in found if isinstance(t, Trial)]


def main(
    only: Annotated[str | None, typer.Option(help="parts of the names of shapes, with commas between")] = None,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved samples")] = 5,
    shown: Annotated[int, typer.Option(help="configurations that are printed")] = 12,
) -> None:
    """Blocks of kernels for many tensors, timed."""
    if not torch.cuda.is_available():
        console.print("[red]there is no CUDA device")
        raise typer.Exit(2)
    index = torch.cuda.current_device()
    gpu, timer, bandwidth = capability(index), CudaTimer(index), copy_bandwidth()
    print(f"copies: {bandwidth / 1e12:.2f} TB/s")
    for name, shapes in SHAPES.items():
        if only and not any(part in name for part in only.split(",")):
            continue
        moved = 28 * sum(torch.Size(s).numel() for s in shapes)
        torch.cuda.empty_cache()
        for table in (True, False):
            found = trials(planned(adamw, shapes, table), gpu, table)
            print(f"{name}, {'table' if table else 'tree'}: {[len(w.group.kernels) if w.group else 1 for w in found]}")
            totals: dict[tuple[int, int, int], float] = {}
            for trial in found[: None if table else 1]:  # trees: a group stands for all of as many members
                binaries = compile_kernels([job_of(one, gpu) for one in trial.configurations], current())
                for made in binaries:
                    if isinstance(made, BuildError):
                        console.print(str(made).splitlines()[0])
                with timer.bench(Task((trial,))) as bench:
                    for one, us in measured(trial, binaries, bench, rounds):
                        key = one.xblock, one.rblock, one.warps
                        totals[key] = totals.get(key, 0.0) + us
                if not table and trial.group is not None:
                    moved = 28 * sum(trial.group.points)
            if not totals:
                continue
            first = next(iter(totals))
            for key, us in sorted(totals.items(), key=lambda item: item[1])[:shown]:
                mark = " <- of the table" if key == first else ""
                print(f"  {key[0]:5} x {key[1]:2} x {key[2]:2}  {us:8.1f} µs  {moved / us * 1e6 / bandwidth:.3f}{mark}")
            if first not in sorted(totals, key=totals.__getitem__)[:shown]:
                print(f"  {first}: {totals[first]:.1f} µs, of the table")


if __name__ == "__main__":
    typer.run(main)
