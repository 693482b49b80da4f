"""Programs on a CUDA device under several systems, interleaved in one process: what all such benchmarks do, and times, errors, memory and the
table of programs of matrix products.
"""

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import typer
from rich.console import Console
from torch import Tensor

import backends
import report
from measure import errors, geomean, interleaved_us, within_twice

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


def first_calls(
    fn: Callable[..., Any], inputs: Sequence[Tensor], names: Sequence[str], reference: Any, row: dict[str, Any]
) -> dict[str, Callable[[], Any]]:
    """Compile a program under every backend in `names`, of which eager is the first, and call it once; calls of what ran. `row` gets the seconds
    that this took, kernels and extern calls, what failed, and errors judged by the results `reference` of a float64 run, unless that is None.
    """
    row |= {key: {} for key in ("failed", "accurate", "errors", "compile_s", "counts")}
    thunks: dict[str, Callable[[], Any]] = {}
    for name in names:
        call = fn if name == "eager" else backends.compile_with(name, fn)
        before = backends.counts(name)
        try:
            start = time.perf_counter()
            got = call(*inputs)
            torch.cuda.synchronize()
            row["compile_s"][name] = time.perf_counter() - start
            if reference is not None:
                row["errors"][name] = errors(got, reference)
                row["accurate"][name] = within_twice(row["errors"][name], row["errors"]["eager"], got)
        except Exception as error:
            if name == "eager":
                raise
            row["failed"][name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:200]
            continue
        after = backends.counts(name)
        row["counts"][name] = {k: after[k] - before[k] for k in ("kernels", "externs") if k in after}
        thunks[name] = functools.partial(call, *inputs)
    return thunks


def in_float64(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """The program's results, computed in float64."""
    return fn(*(t.double() if t.is_floating_point() else t for t in inputs))


def run_program(program: Program, names: list[str], rounds: int) -> dict[str, Any]:
    """Times, errors and peak memory of one program under every backend in `names`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = program.inputs()
    row: dict[str, Any] = {"name": program.name, "shape": program.shape}
    thunks = first_calls(program.fn, inputs, names, in_float64(program.fn, inputs), row)
    row["peak_mb"] = {}
    for name, thunk in thunks.items():
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        thunk()
        torch.cuda.synchronize()
        row["peak_mb"][name] = (torch.cuda.max_memory_allocated() - held) / 2**20
    row["us"] = interleaved_us(thunks, rounds)
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
    return found | faults(rows, names)


def faults(rows: list[dict[str, Any]], names: Sequence[str]) -> dict[str, list[str]]:
    """The programs that each system but eager computed inaccurately, or not at all."""
    found: dict[str, list[str]] = {}
    for n in names[1:]:
        found[f"inaccurate {n}"] = [r["name"] for r in rows if r["accurate"].get(n) is False]
        found[f"failed {n}"] = [r["name"] for r in rows if n in r["failed"]]
    return found


def note(row: Mapping[str, Any]) -> str:
    """What a row of the table says of failures."""
    wrong = [f"{n} ✗" for n, ok in row["accurate"].items() if not ok]
    return "; ".join([*(f"{n}: {e}" for n, e in row["failed"].items()), *wrong])


def told(summary: Mapping[str, Any]) -> list[str]:
    """The lines below the table."""
    return ["", *(f"- {k}: {v:.3f}" if isinstance(v, float) else f"- {k}: {v}" for k, v in summary.items())]


def markdown(result: dict[str, Any]) -> str:
    """The table of results, with the machine and the command."""
    names = result["names"]
    head = ["program", "size", *(f"{n} us" for n in names), *(f"{n} TFLOP/s" for n in names)]
    head += [*(f"{n} MB" for n in names), *(f"{n} error" for n in names), "kernels, externs", "note"]
    lines = report.heading(result)
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in result["programs"]:
        cells = [_cell(r, table, n, form) for table, form in _COLUMNS for n in names]
        made = [
            f"{n} {c.get('kernels', '—')}, {c.get('externs', '—')}"
            for n, c in r["counts"].items()
            if n.startswith("opforge")
        ]
        cells += ["; ".join(made), note(r)]
        lines.append(f"| {' | '.join([r['name'], r['shape'], *cells])} |")
    return "\n".join([*lines, *told(result["summary"])]) + "\n"


_COLUMNS = (("us", ".1f"), ("tflops", ".0f"), ("peak_mb", ".0f"), ("errors", ".1e"))


def _cell(row: dict[str, Any], table: str, name: str, form: str) -> str:
    value = row[table].get(name)
    if isinstance(value, dict):
        value = value["rel_norm"]
    return "—" if value is None else format(value, form)


def run_all(programs: Sequence[Program], names: list[str], rounds: int, out: Path) -> None:
    """Every program, whose results so far are in `out` with the suffixes .json and .md; prints the table."""

    def times(row: Mapping[str, Any]) -> str:
        return ", ".join(f"{n} {t:.0f}" for n, t in row["us"].items()) + " us"

    measure_all(programs, lambda p: run_program(p, names, rounds), names, out, summary, markdown, times)


def measure_all(
    programs: Sequence[Any],
    measured: Callable[[Any], dict[str, Any]],
    names: list[str],
    out: Path,
    summarized: Callable[[list[dict[str, Any]], list[str]], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    shown: Callable[[Mapping[str, Any]], str],
    **more: Any,
) -> None:
    """The row that `measured` makes of every program; results so far, with `more`, are in `out` with the suffixes .json and .md. Prints what is
    `shown` of each row, and the table.
    """
    machine = report.machine(torch.get_num_threads()) | {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
    }
    rows: list[dict[str, Any]] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for k, program in enumerate(programs, 1):
            row = measured(program)
            rows.append(row)
            console.print(f"{k}/{len(programs)} {program.name}: {shown(row)} {row['failed'] or ''}")
            result = {"machine": machine, "command": report.command(), **more, "names": names, "programs": rows}
            result["summary"] = summarized(rows, names)
            out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
            out.with_suffix(".md").write_text(table(result))
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
    """The programs whose names contain one of the parts, with commas between; typer.Exit(2) where there are none."""
    wanted = [w.strip() for w in (only or "").split(",") if w.strip()]
    found = [p for p in programs if not wanted or any(w in p.name for w in wanted)]
    if not found:
        console.print(f"[red]no program's name contains {only!r}; there are: {', '.join(p.name for p in programs)}")
        raise typer.Exit(2)
    return found
