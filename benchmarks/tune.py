"""Times every kernel of the memory-bound programs on a CUDA device with other blocks than it would get: what the rules of
`runtime/codegen/triton_unit.py` are taken from.

    python benchmarks/tune.py                    everything
    python benchmarks/tune.py --only softmax     the programs whose name contains "softmax"

A kernel runs by itself, on the program's inputs and on random numbers where another kernel would write. Its share is of the bandwidth of copies,
measured in the same run, for what it reads and writes. All configurations of all kernels are compiled first, side by side.
"""

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from gpu import copy_bandwidth, microseconds
from traffic import planned, traffic

from opforge.errors import BuildError
from opforge.runtime.build.triton_job import Binary
from opforge.runtime.build.triton_pool import compile_kernels
from opforge.runtime.codegen.triton_launch import Launch, launch
from opforge.runtime.codegen.triton_unit import TritonKernel, render_triton
from opforge.runtime.config import current
from opforge.runtime.execute.launch import launcher, load_function
from opforge.runtime.ir.nodes import Buffer
from opforge.runtime.schedule.memory import home
from opforge.runtime.schedule.plan import Kernel, Plan
from opforge.runtime.targets.cuda import WARP, capability, job_of

from programs.memory_bound import BOUND, BoundProgram

console = Console(stderr=True)
HERE = Path(__file__).parent
MOST = 1 << 15  # elements of a tile
SHOWN = 4  # configurations of a kernel that are printed


@dataclass(frozen=True)
class Work:
    """One kernel of a program with the configurations that are tried."""

    program: BoundProgram
    plan: Plan
    kernel: Kernel
    shape: Launch
    tried: list[TritonKernel]


def configurations(shape: Launch, one: TritonKernel) -> list[TritonKernel]:
    """The kernel as it is, then with half, twice and four times its points, steps and warps, as far as they make sense."""
    x, r, w = one.xblock, one.rblock, one.warps
    points, steps = [x, x // 2, 2 * x, 4 * x], [r]
    if not shape.persistent and shape.inner != 1:
        points, steps = ([x, x // 2, 2 * x] if shape.across else [x]), [r, r // 4, r // 2, 2 * r]
    found = {(a, b, c): None for a in points for b in steps for c in (w, w // 4, w // 2, 2 * w)}
    fit = [(a, b, c) for a, b, c in found if a >= 1 and b >= 1 and 1 <= c <= 32 and 8 * c <= a * b <= MOST]
    return [replace(one, xblock=a, rblock=b, warps=c) for a, b, c in dict.fromkeys([(x, r, w), *fit])]


def work_of(programs: list[BoundProgram]) -> Iterator[Work]:
    """The kernels that run by themselves; of those with equal text the first."""
    for program in programs:
        plan, _ = planned(program)
        unit = render_triton(plan)
        for k in plan.kernels():
            if unit.symbols.get(k.name) == k.name:
                shape = launch(k, plan.layouts)
                yield Work(program, plan, k, shape, configurations(shape, unit.kernels[k.name]))


def memory_of(work: Work) -> list[int]:
    """Addresses of the kernel's buffers, and what keeps them alive last."""
    inputs = [make(torch.device("cuda")) for make in work.program.inputs]
    given = dict(zip((b.name for b in work.plan.inputs), inputs, strict=False))
    there: dict[str, torch.Tensor] = {}
    names = [*work.kernel.reads, *work.kernel.writes]
    for name in (home(work.plan, n) for n in names):
        if name not in there:
            there[name] = given[name].clone() if name in given else _random(work.plan.layouts[name])
    _KEPT[:] = list(there.values())
    return [there[home(work.plan, n)].data_ptr() for n in names]


_KEPT: list[torch.Tensor] = []  # of the kernel that is being timed


def _random(b: Buffer) -> torch.Tensor:
    assert b.stride is not None
    n = 1 + sum((int(n) - 1) * int(s) for n, s in zip(b.shape, b.stride, strict=True)) if 0 not in b.shape else 0
    dtype = getattr(torch, b.dtype)
    made = torch.randn(max(n, 1), device="cuda")
    return made.to(dtype) if dtype.is_floating_point else torch.zeros_like(made, dtype=dtype)


def timed(work: Work, binaries: list[Any], rounds: int) -> list[tuple[TritonKernel, float]]:
    """The median time of each configuration that compiles and that the device takes, in µs, interleaved."""
    addresses = memory_of(work)
    runs: list[tuple[TritonKernel, Any]] = []
    for one, binary in zip(work.tried, binaries, strict=True):
        if not isinstance(binary, Binary):
            continue
        shared, threads = binary.meta["shared"], WARP * binary.meta["warps"]
        try:
            loaded = load_function(binary.cubin, binary.meta["name"], shared, threads), shared, threads
        except BuildError:  # more threads or memory than there are
            continue
        run = launcher(loaded, lambda: loaded, one.name, len(addresses), 0, torch.cuda.current_device())  # noqa: B023
        assert isinstance(work.shape.outer, int)
        programs = -(-work.shape.outer // one.xblock)
        run(programs, *addresses)
        runs.append((one, lambda run=run, programs=programs: run(programs, *addresses)))
    samples: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for (_one, thunk), times in zip(runs, samples, strict=True):
            times.append(microseconds(thunk, 10))
    return [(one, statistics.median(times)) for (one, _), times in zip(runs, samples, strict=True)]


def main(
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved samples")] = 5,
    out: Annotated[Path | None, typer.Option(help="file for all times, as JSON")] = None,
) -> None:
    """Blocks of Triton kernels, timed."""
    if not torch.cuda.is_available():
        console.print("[red]there is no CUDA device")
        raise typer.Exit(2)
    wanted = [w.strip() for w in (only or "").split(",") if w.strip()]
    works = list(work_of([p for p in BOUND.values() if not wanted or any(w in p.name for w in wanted)]))
    jobs = [job_of(one, capability(torch.cuda.current_device())) for work in works for one in work.tried]
    console.print(f"{len(works)} kernels, {len(jobs)} configurations")
    binaries = iter(compile_kernels(jobs, current()))
    bandwidth = copy_bandwidth()
    rows = []
    for work in works:
        found = timed(work, [next(binaries) for _ in work.tried], rounds)
        reads, writes, _ = traffic(work.kernel, work.plan.layouts, work.shape)
        moved = reads.total() + writes.total()
        named = [(f"{k.xblock} x {k.rblock} x {k.warps}", moved / us * 1e6 / bandwidth) for k, us in found]
        best = sorted(named, key=lambda n: -n[1])[:SHOWN]
        print(
            f"{work.program.name:20} {work.kernel.name[:30]:30} {named[0][0]:>16} {named[0][1]:.2f}; best "
            + ", ".join(f"{name} {share:.2f}" for name, share in best)
        )
        rows.append({"program": work.program.name, "kernel": work.kernel.name, "moved": moved, "shares": dict(named)})
        if out is not None:
            out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
