"""Times long sums whose parts the last program adds up, beside the same with a second kernel, on a CUDA device, in one process.

    python benchmarks/last_program.py              all programs
    python benchmarks/last_program.py --only norm  those whose name contains "norm"

Each program is compiled twice, with tables that differ in `last` only (specs/tuning.yaml), and both are called in turns: the time of a call where
the device waits for the host, the device's own time (launches queued before they run), and that of a replay of a CUDA graph. Results of one kernel
must be the same to the bit in each of many calls and replays, on one stream and on several at once; the exit status is 1 where one is not. "Order":
they are not those of two kernels to the bit, since a block of several rows adds up in another order, but are no less accurate.
"""

import functools
import statistics
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor

import opforge
from opforge.generated import tuning
from opforge.runtime.codegen.triton_blocks import tuning_of
from opforge.runtime.targets.cuda import capability

console = Console(stderr=True)
Program = Any
"""A function of tensors that gives one."""
ROUNDS, CALLS, CHECKS = 9, 50, 300
EPS = torch.finfo(torch.float32).eps

PROGRAMS: dict[str, tuple[Program, tuple[tuple[int, ...], ...]]] = {
    "sum of 256 thousand": (lambda x: x.sum(), ((512, 512),)),
    "sum of a million": (lambda x: x.sum(), ((1024, 1024),)),
    "sum of 16 million": (lambda x: x.sum(), ((4096, 4096),)),
    "sum of 256 million": (lambda x: x.sum(), ((16384, 16384),)),
    "norm of a million": (lambda x: x.norm(), ((1024, 1024),)),
    "mse of a million": (lambda x, y: F.mse_loss(x, y), ((1024, 1024), (1024, 1024))),
    "mse of 16 million": (lambda x, y: F.mse_loss(x, y), ((4096, 4096), (4096, 4096))),
    "8 rows of a million": (lambda x: x.sum(-1), ((8, 1 << 20),)),
    "maxima of 32 rows": (lambda x: x.amax(-1), ((32, 1 << 18),)),
}


@contextmanager
def table(last: tuning.Last | None) -> Iterator[None]:
    """The table of this GPU with another rule for last programs."""
    mine = capability(torch.cuda.current_device())
    known = min(tuning.TUNING, key=lambda k: (abs(k - mine), k))
    old = tuning.TUNING[known]
    tuning.TUNING[known] = replace(old, last=last)
    tuning_of.cache_clear()
    try:
        yield
    finally:
        tuning.TUNING[known] = old
        tuning_of.cache_clear()


def compiled(f: Program, inputs: list[Tensor], last: tuning.Last | None, folder: str) -> tuple[Program, int]:
    """The function, compiled anew with a cache of its own, and how many kernels it has."""
    code = f.__code__.replace(co_name=f"{'two' if last is None else 'one'}_{len(folder)}")
    twin = types.FunctionType(code, f.__globals__, code.co_name, f.__defaults__, f.__closure__)
    with table(last):
        made = torch.compile(twin, backend="opforge", dynamic=False, options={"strict": True, "cache_dir": folder})
        opforge.reset_stats()
        made(*inputs)
    return made, int(opforge.stats()["kernels"])


def recorded(run: Program, inputs: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A CUDA graph of one call, and its result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*inputs)
    return graph, out


def microseconds(run: Callable[[], object], ahead: Tensor | None) -> float:
    """µs of a call, of many one after another; `ahead`: memory that the device fills first, while the host launches."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if ahead is not None:
        for _ in range(4):
            ahead.zero_()
    start.record()
    for _ in range(CALLS):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / CALLS


def differs(one: Program, inputs: list[Tensor], want: Tensor) -> str:
    """Where results are not the same to the bit: in many calls, on several streams at once, in replays beside calls; or nothing."""
    if not all(torch.equal(one(*inputs), want) for _ in range(CHECKS)):
        return "calls"
    streams = [torch.cuda.Stream() for _ in range(4)]
    graphs = [recorded(one, inputs) for _ in streams]
    torch.cuda.synchronize()
    kept: list[Tensor] = []
    for _ in range(CHECKS // 10):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                kept.append(one(*inputs))
                graph.replay()
                kept.append(one(*inputs))
    torch.cuda.synchronize()
    if not all(torch.equal(k, want) for k in kept):
        return "calls on several streams"
    return "" if all(torch.equal(out, want) for _, out in graphs) else "replays"


def main(
    only: Annotated[str | None, typer.Option(help="part of the names of programs")] = None,
    rows: Annotated[int, typer.Option(help="`rows` of the rule")] = 256,
    elements: Annotated[int, typer.Option(help="`elements` of the rule")] = 4096,
    out: Annotated[Path | None, typer.Option(help="a file for the table, too")] = None,
) -> None:
    """Long sums with one kernel and with two."""
    if not torch.cuda.is_available():
        console.print("[red]there is no CUDA device")
        raise typer.Exit(2)
    lines = [
        "| program | kernels | calls, µs | one | device, µs | one | replay, µs | one | differs |",
        "|---" * 9 + "|",
    ]
    ahead = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    wrong = False
    for name, (f, shapes) in PROGRAMS.items():
        if only and only not in name:
            continue
        torch.manual_seed(0)
        inputs = [torch.randn(s, device="cuda") for s in shapes]
        with tempfile.TemporaryDirectory() as folder:
            runs: dict[str, Program] = {}
            counts = []
            for way, last in (("two", None), ("one", tuning.Last(rows, elements))):
                runs[way], count = compiled(f, inputs, last, f"{folder}/{way}")
                counts.append(str(count))
            two, want, exact = runs["two"](*inputs), runs["one"](*inputs), f(*(t.double() for t in inputs))
            found = differs(runs["one"], inputs, want)
            if (
                not found
                and float((want - exact).abs().max())
                > 2 * float((two - exact).abs().max()) + float(exact.abs().max()) * EPS
            ):
                found = "accuracy"
            wrong |= bool(found)
            if not found and not torch.equal(want, two):
                found = "order"
            graphs = {way: recorded(run, inputs)[0] for way, run in runs.items()}
            times: dict[tuple[str, str], list[float]] = {}
            for k in range(ROUNDS):
                for way in list(runs)[:: 1 if k % 2 else -1]:
                    call, replay = functools.partial(runs[way], *inputs), graphs[way].replay
                    for what, us in (
                        ("calls", microseconds(call, None)),
                        ("device", microseconds(call, ahead)),
                        ("replay", microseconds(replay, ahead)),
                    ):
                        times.setdefault((what, way), []).append(us)
        cells = [
            f"{statistics.median(times[what, way]):.2f}"
            for what in ("calls", "device", "replay")
            for way in ("two", "one")
        ]
        lines.append(f"| {name} | {', '.join(counts)} | {' | '.join(cells)} | {found or 'no'} |")
        print(lines[-1], flush=True)
    print("\n".join(lines))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("\n".join(lines) + "\n")
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
