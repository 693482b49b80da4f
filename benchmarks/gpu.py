"""Times memory-bound programs on a CUDA device under eager, Inductor and opforge, interleaved in one process, against the copy bandwidth.

    python benchmarks/gpu.py                    everything
    python benchmarks/gpu.py --only softmax     the programs whose name contains "softmax"

The bandwidth is measured in the same run, by copies of a gigabyte. A program's share of it is the bytes that it must move at least
(inputs read once, results written once) over its time and that bandwidth. Errors are judged by a float64 run.
"""

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from torch.utils import _pytree as pytree

import backends
import report
from measure import errors, geomean, within_twice
from programs.memory_bound import BOUND, BoundProgram, size_of

console = Console(stderr=True)
HERE = Path(__file__).parent
PAIRS = (("opforge", "inductor"), ("opforge", "eager"), ("inductor", "eager"), ("opforge-max", "opforge"))
RANDOM = ("dropout_add",)  # results that no other run has


def microseconds(thunk: Callable[[], Any], calls: int) -> float:
    """Of one call, between events on the device's stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        thunk()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of copies of a gigabyte."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    us = statistics.median(microseconds(lambda: target.copy_(source), 5) for _ in range(7))
    return 2 * (1 << 30) / us * 1e6


def tensors(result: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def run_program(program: BoundProgram, names: list[str], rounds: int, bandwidth: float) -> dict[str, Any]:
    """Times and errors of one program under every backend in `names`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    device = torch.device("cuda")
    inputs = [make(device) for make in program.inputs]
    row: dict[str, Any] = {
        "name": program.name,
        "shape": program.shape,
        "failed": {},
        "accurate": {},
        "errors": {},
        "compile_s": {},
    }
    want = program.fn(*inputs)
    moved = program.moved(inputs, tensors(want)) if program.moved else size_of([*inputs, *tensors(want)])
    reference = None
    if program.name not in RANDOM:
        reference = program.fn(*(t.double() if t.is_floating_point() else t for t in inputs))
        eager_error = row["errors"]["eager"] = errors(want, reference)
    thunks: dict[str, Callable[[], Any]] = {}
    for name in names:
        call = program.fn if name == "eager" else backends.compile_with(name, program.fn)
        try:
            start = time.perf_counter()
            got = call(*inputs)
            torch.cuda.synchronize()
            row["compile_s"][name] = time.perf_counter() - start
            if reference is not None:
                row["errors"][name] = errors(got, reference)
                row["accurate"][name] = within_twice(row["errors"][name], eager_error, got)
        except Exception as error:
            if name == "eager":
                raise
            row["failed"][name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:200]
            continue
        thunks[name] = functools.partial(call, *inputs)
    del reference, want
    row["counts"] = {name: backends.counts(name) for name in thunks}
    calls = {n: max(1, min(50, round(2e4 / max(microseconds(t, 2), 1)))) for n, t in thunks.items()}
    samples: dict[str, list[float]] = {name: [] for name in thunks}
    for k in range(rounds):
        order = list(thunks)
        for name in order[k % len(order) :] + order[: k % len(order)]:
            samples[name].append(microseconds(thunks[name], calls[name]))
    row["us"] = {name: statistics.median(s) for name, s in samples.items()}
    row["share"] = {name: moved / us * 1e6 / bandwidth for name, us in row["us"].items()}
    row["moved_mb"] = moved / 2**20
    return row


def summary(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Geometric means over the programs that ran under all."""
    full = [r for r in rows if all(n in r["us"] for n in names)]
    found: dict[str, Any] = {f"share {n}": geomean([r["share"][n] for r in full]) for n in names}
    for mine, other in PAIRS:
        if mine in names and other in names:
            ratios = [r["us"][other] / r["us"][mine] for r in full]
            found[f"speed {mine}/{other}"] = geomean(ratios)
            found[f"slower {mine}/{other}"] = [r["name"] for r, q in zip(full, ratios, strict=True) if q < 1]
    for n in names[1:]:
        found[f"inaccurate {n}"] = [r["name"] for r in rows if r["accurate"].get(n) is False]
        found[f"failed {n}"] = [r["name"] for r in rows if n in r["failed"]]
    return found


def markdown(result: dict[str, Any]) -> str:
    """The table of results, with the machine, the command and the bandwidth."""
    names = result["names"]
    head = ["program", "size", "MB moved", *(f"{n} us" for n in names), *(f"{n} of copy" for n in names), "note"]
    lines = report.heading(result, f"; copies move {result['bandwidth'] / 1e12:.2f} TB/s")
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in result["programs"]:
        note = "; ".join(
            [*(f"{n}: {e}" for n, e in r["failed"].items()), *(f"{n} ✗" for n, ok in r["accurate"].items() if not ok)]
        )
        cells = [f"{r['us'][n]:.1f}" if n in r["us"] else "—" for n in names]
        cells += [f"{r['share'][n]:.2f}" if n in r["share"] else "—" for n in names]
        lines.append(f"| {' | '.join([r['name'], r['shape'], format(r['moved_mb'], '.0f'), *cells, note])} |")
    lines.append("")
    lines += [f"- {k}: {v:.3f}" if isinstance(v, float) else f"- {k}: {v}" for k, v in result["summary"].items()]
    return "\n".join(lines) + "\n"


def main(
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved samples")] = 7,
    backend: Annotated[str, typer.Option(help="compared with eager, with commas between")] = "inductor,opforge",
    out: Annotated[Path, typer.Option(help="folder for the results")] = HERE / "results",
) -> None:
    """Memory-bound programs on a GPU."""
    if not torch.cuda.is_available():
        console.print("[red]there is no CUDA device")
        raise typer.Exit(2)
    names = ["eager", *backend.split(",")]
    for name in names[1:]:
        backends.load(name)
    torch._dynamo.config.recompile_limit = 64
    wanted = [w.strip() for w in (only or "").split(",") if w.strip()]
    programs = [p for p in BOUND.values() if not wanted or any(w in p.name for w in wanted)]
    bandwidth = copy_bandwidth()
    console.print(f"copies move {bandwidth / 1e12:.2f} TB/s")
    machine = report.machine(torch.get_num_threads()) | {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
    }
    rows: list[dict[str, Any]] = []
    out.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for k, program in enumerate(programs, 1):
            row = run_program(program, names, rounds, bandwidth)
            rows.append(row)
            console.print(
                f"{k}/{len(programs)} {program.name}: "
                + ", ".join(f"{n} {s:.2f}" for n, s in row["share"].items())
                + f" {row['failed'] or ''}"
            )
            result = {
                "machine": machine,
                "command": report.command(),
                "bandwidth": bandwidth,
                "names": names,
                "programs": rows,
                "summary": summary(rows, names),
            }
            (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
            (out / "gpu.md").write_text(markdown(result))
            torch.cuda.empty_cache()
    print((out / "gpu.md").read_text() if rows else "nothing was measured")


if __name__ == "__main__":
    typer.run(main)
