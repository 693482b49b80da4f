"""Programs of matrix products on a CUDA device under several systems, interleaved in one process: times, errors, memory, and the table of them."""

import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from gpu import microseconds
from rich.console import Console
from torch import Tensor

import backends
import report
from measure import errors, geomean, within_twice

console = Console(stderr=True)
PAIRS = (
    ("opforge", "inductor"),
    ("opforge", "eager"),
    ("inductor", "eager"),
    ("opforge-max", "inductor-max"),
    ("opforge-max", "opforge"),
)


class Program(Protocol):
    """One program: what it is called, its sizes as text, its function, and the operations of its products."""

    @property
    def name(self) -> str: ...
    @property
    def fn(self) -> Callable[..., Any]: ...
    @property
    def shape(self) -> str: ...
    @property
    def flops(self) -> float: ...
    def inputs(self) -> list[Tensor]: ...


def run_program(program: Program, names: list[str], rounds: int) -> dict[str, Any]:
    """Times, errors and peak memory of one program under every backend in `names`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = program.inputs()
    row: dict[str, Any] = {"name": program.name, "shape": program.shape}
    row |= {key: {} for key in ("failed", "accurate", "errors", "compile_s", "counts", "peak_mb")}
    reference = program.fn(*(t.double() if t.is_floating_point() else t for t in inputs))
    eager_error = row["errors"]["eager"] = errors(program.fn(*inputs), reference)
    thunks: dict[str, Callable[[], Any]] = {}
    for name in names:
        call = program.fn if name == "eager" else backends.compile_with(name, program.fn)
        before = backends.counts(name)
        try:
            start = time.perf_counter()
            got = call(*inputs)
            torch.cuda.synchronize()
            row["compile_s"][name] = time.perf_counter() - start
            row["errors"][name] = errors(got, reference)
            row["accurate"][name] = within_twice(row["errors"][name], eager_error, got)
        except Exception as error:
            if name == "eager":
                raise
            row["failed"][name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:200]
            continue
        after = backends.counts(name)
        row["counts"][name] = {k: after[k] - before[k] for k in ("kernels", "externs") if k in after}
        thunks[name] = functools.partial(call, *inputs)
    del reference, got
    for name, thunk in thunks.items():
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        thunk()
        torch.cuda.synchronize()
        row["peak_mb"][name] = (torch.cuda.max_memory_allocated() - held) / 2**20
    calls = {n: max(1, min(50, round(2e4 / max(microseconds(t, 2), 1)))) for n, t in thunks.items()}
    samples: dict[str, list[float]] = {name: [] for name in thunks}
    for k in range(rounds):
        order = list(thunks)
        for name in order[k % len(order) :] + order[: k % len(order)]:
            samples[name].append(microseconds(thunks[name], calls[name]))
    row["us"] = {name: statistics.median(s) for name, s in samples.items()}
    row["tflops"] = {name: program.flops / us / 1e6 for name, us in row["us"].items()}
    return row


def summary(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Geometric means over the programs that ran under both."""
    found: dict[str, Any] = {}
    for mine, other in PAIRS:
        both = [r for r in rows if mine in r["us"] and other in r["us"]]
        if both:
            found[f"speed {mine}/{other}"] = geomean([r["us"][other] / r["us"][mine] for r in both])
            found[f"slower {mine}/{other}"] = [r["name"] for r in both if r["us"][other] < r["us"][mine]]
    for n in names[1:]:
        found[f"inaccurate {n}"] = [r["name"] for r in rows if r["accurate"].get(n) is False]
        found[f"failed {n}"] = [r["name"] for r in rows if n in r["failed"]]
    return found


def markdown(result: dict[str, Any]) -> str:
    """The table of results, with the machine and the command."""
    names = result["names"]
    head = ["program", "size", *(f"{n} us" for n in names), *(f"{n} TFLOP/s" for n in names)]
    head += [*(f"{n} MB" for n in names), *(f"{n} error" for n in names), "kernels, externs", "note"]
    lines = report.heading(result)
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in result["programs"]:
        note = [
            *(f"{n}: {e}" for n, e in r["failed"].items()),
            *(f"{n} ✗" for n, ok in r["accurate"].items() if not ok),
        ]
        cells = [_cell(r, table, n, form) for table, form in _COLUMNS for n in names]
        made = [
            f"{n} {c.get('kernels', '—')}, {c.get('externs', '—')}"
            for n, c in r["counts"].items()
            if n.startswith("opforge")
        ]
        cells += ["; ".join(made), "; ".join(note)]
        lines.append(f"| {' | '.join([r['name'], r['shape'], *cells])} |")
    lines.append("")
    lines += [f"- {k}: {v:.3f}" if isinstance(v, float) else f"- {k}: {v}" for k, v in result["summary"].items()]
    return "\n".join(lines) + "\n"


_COLUMNS = (("us", ".1f"), ("tflops", ".0f"), ("peak_mb", ".0f"), ("errors", ".1e"))


def _cell(row: dict[str, Any], table: str, name: str, form: str) -> str:
    value = row[table].get(name)
    if isinstance(value, dict):
        value = value["rel_norm"]
    return "—" if value is None else format(value, form)


def run_all(programs: Sequence[Program], names: list[str], rounds: int, out: Path) -> None:
    """Every program, whose results so far are in `out` with the suffixes .json and .md; prints the table."""
    machine = report.machine(torch.get_num_threads()) | {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
    }
    rows: list[dict[str, Any]] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for k, program in enumerate(programs, 1):
            row = run_program(program, names, rounds)
            rows.append(row)
            times = ", ".join(f"{n} {t:.0f}" for n, t in row["us"].items())
            console.print(f"{k}/{len(programs)} {program.name}: {times} us {row['failed'] or ''}")
            result = {
                "machine": machine,
                "command": report.command(),
                "names": names,
                "programs": rows,
                "summary": summary(rows, names),
            }
            out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
            out.with_suffix(".md").write_text(markdown(result))
            torch.cuda.empty_cache()
    print(out.with_suffix(".md").read_text() if rows else "nothing was measured")


def loaded(backend: str) -> list[str]:
    """Eager and the systems of a list with commas, which are imported."""
    names = ["eager", *(n for n in backend.split(",") if n)]
    for name in names[1:]:
        backends.load(name)
    torch._dynamo.config.recompile_limit = 64
    return names


def chosen(programs: Sequence[Any], only: str | None) -> list[Any]:
    """The programs whose names contain one of the parts, with commas between."""
    wanted = [w.strip() for w in (only or "").split(",") if w.strip()]
    return [p for p in programs if not wanted or any(w in p.name for w in wanted)]
