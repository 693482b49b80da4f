"""Shows where the device time of programs of gpu_models.py goes: the kernels of a step by time, for each backend.

    python benchmarks/gpu_profile.py adamw                            eager, Inductor and opforge
    python benchmarks/gpu_profile.py gpt2,vit --backend opforge-reduce
    python benchmarks/gpu_profile.py adamw --backend opforge --host   and the Python functions that take the host's time

`busy` is the time of all kernels, `step` the time from event to event around it: what is not busy waits for the host.
"""

import cProfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from gpu_models import MODES, Compiler, fresh_caches, prepare
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

import backends
from measure import device_us
from programs.gpu_models import PROGRAMS, GpuProgram

STEPS = 3


def host_functions(step: Callable[[], Any], rows: int) -> list[str]:
    """Python functions, and C functions that they call, by their own time in a step. The profiler makes calls slower than work."""
    profiler = cProfile.Profile()
    torch.cuda.synchronize()
    profiler.enable()
    for _ in range(STEPS):
        step()
    profiler.disable()
    torch.cuda.synchronize()
    found = sorted(profiler.getstats(), key=lambda e: -e.inlinetime)
    names = [e.code if isinstance(e.code, str) else f"{e.code.co_filename}:{e.code.co_name}" for e in found]
    return [
        f"{e.inlinetime * 1e6 / STEPS:10.1f} µs {e.callcount / STEPS:7.1f} x  {name[-110:]}"
        for e, name in zip(found[:rows], names, strict=False)
    ]


def profiled(p: GpuProgram, name: str, rows: int, host: bool) -> str:
    """A table of the kernels of a step, the longest first, as text."""
    torch._dynamo.reset()
    with fresh_caches(name) as folder, torch.set_grad_enabled(p.kind == "train"):
        compiler = None if name == "eager" else Compiler(name, folder)
        running = prepare(p, torch.device("cuda"), False, compiler or (lambda fn: fn), double=False)
        for _ in range(5):
            running.step()
        step_us = device_us(running.step, 5)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            running.step()
        host_us = (time.perf_counter() - start) * 1e6 / 5
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(STEPS):
                running.step()
            torch.cuda.synchronize()
        functions = host_functions(running.step, rows) if host else []
    events = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    busy_us = sum(e.self_device_time_total for e in events) / STEPS
    lines = [
        f"{p.name} {name}: step {step_us:.0f} µs, busy {busy_us:.0f} µs, host {host_us:.0f} µs until the last launch"
    ]
    for e in events[:rows]:
        lines.append(f"{e.self_device_time_total / STEPS:10.1f} µs {e.count / STEPS:7.1f} x  {e.key[:110]}")
    return "\n".join([*lines, *functions])


def main(
    only: Annotated[str, typer.Argument(help="names of programs, with commas between")],
    backend: Annotated[str, typer.Option(help=f"columns, of eager, {', '.join(MODES)}")] = "eager,inductor,opforge",
    rows: Annotated[int, typer.Option(help="kernels shown of each")] = 25,
    host: Annotated[bool, typer.Option("--host", help="also Python functions by their own time")] = False,
    out: Annotated[Path | None, typer.Option(help="folder for the tables; printed only without it")] = None,
) -> None:
    """The kernels of a step by device time."""
    console = Console(stderr=True)
    if not torch.cuda.is_available():
        console.print("[red]there is no CUDA device")
        raise typer.Exit(2)
    if unknown := sorted({*only.split(",")} - PROGRAMS.keys()):
        console.print(f"[red]no programs {unknown}; there are {', '.join(PROGRAMS)}")
        raise typer.Exit(2)
    for base in ("inductor", "opforge"):
        if base in backend:
            backends.load(base)
    for name in only.split(","):
        for column in backend.split(","):
            text = profiled(PROGRAMS[name], column, rows, host)
            print(text, flush=True)
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                (out / f"{name}_{column}.txt").write_text(text + "\n")


if __name__ == "__main__":
    typer.run(main)
