"""Programs that opforge compiles in two ways, beside each other on a CUDA device, in one process: times of calls, of the device alone, and of replays
of a CUDA graph; and whether results are right, and the same to the bit in each of many calls and replays, on one stream and on several at once.
"""

import functools
import statistics
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from torch import Tensor

import opforge

from measure import device_us

console = Console(stderr=True)
Program = Any
"""A function of tensors that gives one."""
Ways = Mapping[str, Callable[[], AbstractContextManager[object]]]
"""What holds while a program is compiled: the way that it was, then the way that is judged."""
ROUNDS, CALLS, CHECKS = 9, 50, 300
WHAT = "calls", "device", "replay"


def compiled(f: Program, inputs: list[Tensor], backend: str, folder: str) -> tuple[Program, int]:
    """The function, compiled anew (by opforge with a cache of its own), and how many kernels opforge has for it."""
    code = f.__code__.replace(co_name=f"of_{Path(folder).name}_{len(folder)}".replace(" ", "_"))
    twin = types.FunctionType(code, f.__globals__, code.co_name, f.__defaults__, f.__closure__)
    options: dict[str, Any] | None = {"strict": True, "cache_dir": folder} if backend == "opforge" else None
    made = torch.compile(twin, backend=backend, dynamic=False, options=options)
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
    torch.cuda.synchronize()
    if ahead is not None:
        for _ in range(4):
            ahead.zero_()
    return device_us(run, CALLS)


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
        if len(kept) > CHECKS // 10:
            torch.cuda.synchronize()
            if not all(torch.equal(k, want) for k in kept):
                return "calls on several streams"
            kept.clear()
    torch.cuda.synchronize()
    return "" if all(torch.equal(out, want) for _, out in graphs) else "replays"


def measured(runs: Mapping[str, Program], inputs: list[Tensor]) -> dict[tuple[str, str], float]:
    """µs of a call, of the device's own work for it, and of a replay, by that and by the way; medians of rounds in turns."""
    graphs = {way: recorded(run, inputs)[0] for way, run in runs.items()}
    ahead = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    times: dict[tuple[str, str], list[float]] = {}
    for k in range(ROUNDS):
        for way in list(runs)[:: 1 if k % 2 else -1]:
            call, replay = functools.partial(runs[way], *inputs), graphs[way].replay
            for what, us in zip(
                WHAT, (microseconds(call, None), microseconds(call, ahead), microseconds(replay, ahead)), strict=True
            ):
                times.setdefault((what, way), []).append(us)
    return {key: statistics.median(some) for key, some in times.items()}


def compare(
    programs: Mapping[str, tuple[Program, tuple[Any, ...]]],
    ways: Ways,
    others: tuple[str, ...],
    make: Callable[[Any], Tensor],
    only: str | None,
    out: Path | None,
) -> None:
    """Prints a table of the programs whose name contains `only`. Ends with status 1 where a result is wrong or not always the same, with 2 where
    there is no device. others: further backends. make: a tensor of what a program says of it.
    """
    if not torch.cuda.is_available():
        console.print("[red]there is no CUDA device")
        raise typer.Exit(2)
    before, after = ways
    columns = [f"{what}, µs: {name}" for what in WHAT for name in (before, after, *others)]
    lines = [
        f"Machine: {torch.cuda.get_device_name()}, torch {torch.__version__}.",
        "",
        f"Command: `python {Path(sys.argv[0]).parent.name}/{Path(sys.argv[0]).name}`",
        "",
        f"| program | kernels | {' | '.join(columns)} | differs |",
        "|---" * (len(columns) + 3) + "|",
    ]
    wrong = False
    for name, (f, told) in programs.items():
        if only and only not in name:
            continue
        torch._dynamo.reset()
        torch.manual_seed(0)
        inputs = [make(one) for one in told]
        with tempfile.TemporaryDirectory() as folder:
            runs: dict[str, Program] = {}
            counts = []
            for way in (before, after, *others):
                with ways.get(way, nullcontext)():
                    runs[way], count = compiled(f, inputs, "opforge" if way in ways else way, f"{folder}/{way}")
                counts.append(str(count))
            found = faults(f, runs[before], runs[after], inputs)
            wrong |= bool(found) and found != "order"
            times = measured(runs, inputs)
        cells = [f"{times[what, way]:.2f}" for what in WHAT for way in runs]
        lines.append(f"| {name} | {', '.join(counts[:2])} | {' | '.join(cells)} | {found or 'no'} |")
        console.print(lines[-1])
    text = "\n".join(lines)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    if wrong:
        raise typer.Exit(1)


def faults(f: Program, before: Program, after: Program, inputs: list[Tensor]) -> str:
    """What is wrong with the results of the second way. "order": they are not those of the first to the bit, but no less accurate."""
    old, new = before(*inputs), after(*inputs)
    if found := differs(after, inputs, new):
        return found
    exact = f(*(t.double() for t in inputs))
    room = 2 * float((old - exact).abs().max()) + float(exact.abs().max()) * torch.finfo(new.dtype).eps
    if not float((new - exact).abs().max()) <= room:
        return "accuracy"
    return "" if torch.equal(new, old) else "order"


__all__ = ["Program", "compare"]
