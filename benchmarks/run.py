"""Times eager, Inductor and opforge on every program, interleaved in one process, and writes benchmarks/results/.

    python benchmarks/run.py                 everything
    python benchmarks/run.py --only layer    the programs whose name contains "layer"
    python benchmarks/run.py --quick         three programs, few rounds, no compile times
    python benchmarks/run.py --resume        what the results of this commit lack, as after an interruption

Speeds are medians over rounds of (time of the one) / (time of the other) in the same round: above 1 is faster.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

import compared

import backends
import report
from measure import errors, interleaved, median_ratio, within_twice
from programs import PROGRAMS, QUICK, build, to_float64
from programs.base import Program

console = Console(stderr=True)
HERE = Path(__file__).parent


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def run_program(program: Program, names: list[str], rounds: int) -> dict[str, Any]:
    """Errors, and times interleaved, of one program under every backend in `names` ("eager" is always one of them).

    A backend that raises has its message under `failed` and no figures; the others are measured all the same.
    """
    torch._dynamo.reset()
    row: dict[str, Any] = {"name": program.name, "group": program.group, "shape": program.shape, "failed": {}}
    fn, inputs = build(program)
    reference_fn, reference_inputs = to_float64(fn, inputs)
    reference = reference_fn(*reference_inputs)
    del reference_fn, reference_inputs
    thunks, results, row["counts"] = {}, {}, {}
    for name in names:
        before = backends.counts(name)
        try:
            compiled = backends.compile_with(name, fn)
            results[name] = compiled(*inputs)
            row.setdefault("errors", {})[name] = errors(results[name], reference)
        except Exception as error:
            if name == "eager":
                raise
            row["failed"][name] = first_line(error)
            continue
        row["counts"][name] = counted(before, backends.counts(name))
        thunks[name] = lambda compiled=compiled: compiled(*inputs)
    row["accurate"] = {
        name: within_twice(row["errors"][name], row["errors"]["eager"], results[name])
        for name in thunks
        if name != "eager"
    }
    del results, reference
    gc.collect()
    samples = interleaved(thunks, rounds)
    row["ms"] = {name: median_ratio(s, [1e-3] * len(s)) for name, s in samples.items()}
    row["speed"] = {
        f"{mine}/{other}": median_ratio(samples[other], samples[mine])
        for mine in samples
        for other in samples
        if mine != other and mine != "eager"
    }
    return row


def counted(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What one compilation added to a backend's running counts."""
    return {k: v - before.get(k, 0) if isinstance(v, int | float) else v for k, v in after.items()}


def cold(program: str, backend: str, timeout_s: float) -> dict[str, Any]:
    """Compile in a fresh process with fresh caches; {"failed": why} where that fails."""
    try:
        done = subprocess.run(
            [sys.executable, str(HERE / "cold.py"), program, backend],
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {timeout_s:.0f} s"}
    if done.returncode != 0:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def usable(names: list[str]) -> list[str]:
    """The backends that can be imported here; says which cannot."""
    found = []
    for name in names:
        try:
            backends.load(name)
            if name == "opforge":
                backends.timed_backend(name, [0.0])
            found.append(name)
        except (ImportError, torch._dynamo.exc.InvalidBackend) as error:
            console.print(f"[yellow]{name} is left out: {first_line(error)}")
    return found


def chosen(only: str | None, quick: bool) -> list[Program]:
    """The programs to run; typer.Exit(2) where `only` matches none."""
    return [PROGRAMS[name] for name in QUICK] if quick and not only else compared.chosen(list(PROGRAMS.values()), only)


def main(
    only: Annotated[str | None, typer.Option(help="parts of program names, with commas between")] = None,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved samples")] = 21,
    quick: Annotated[bool, typer.Option(help="three programs, 5 rounds, no compile times, nothing written")] = False,
    compile_time: Annotated[bool, typer.Option(help="cold compile and peak memory in fresh processes")] = True,
    backend: Annotated[str, typer.Option(help="compared with eager, with commas between")] = "inductor,opforge",
    threads: Annotated[int, typer.Option(help="torch's intra-op threads")] = 2,
    resume: Annotated[bool, typer.Option(help="keep the results of this commit, measure what they lack")] = False,
    timeout: Annotated[float, typer.Option(help="seconds allowed for one cold compile")] = 600.0,
    out: Annotated[Path, typer.Option(help="folder for the results")] = HERE / "results",
) -> None:
    """Compare eager, Inductor and opforge on the benchmark programs."""
    torch.set_num_threads(threads)
    caches = tempfile.TemporaryDirectory(prefix="bench-cache-")  # kernels of an earlier run must not be found
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{caches.name}/inductor"
    os.environ["OPFORGE_CACHE_DIR"] = f"{caches.name}/opforge"
    torch._dynamo.config.recompile_limit = 64
    if quick:
        rounds, compile_time = min(rounds, 5), False
    names = ["eager", *usable([b.strip() for b in backend.split(",")])]
    machine = report.machine(threads)
    programs = chosen(only, quick)
    rows = results_of(machine, out) if resume else {}
    for i, program in enumerate(programs, 1):
        console.print(f"[dim]{i}/{len(programs)}[/] {program.name}  [dim]{program.shape}")
        row = rows.get(program.name)
        if row is None:
            try:
                with torch.no_grad():
                    row = run_program(program, names, rounds)
            except ImportError as error:
                console.print(f"  [yellow]skipped: {first_line(error)}")
                row = {"name": program.name, "group": program.group, "shape": program.shape, "skipped": str(error)}
        if compile_time and "cold" not in row and "skipped" not in row:
            row["cold"] = {name: cold(program.name, name, timeout) for name in ["dynamo", *names]}
        rows[program.name] = row
        if "skipped" not in row:
            console.print("  " + report.one_line(row))
        found = [rows[name] for name in PROGRAMS if name in rows]
        result = {
            "machine": machine,
            "command": report.command(),
            "rounds": rounds,
            "backends": names,
            "programs": found,
        }
        result["summary"] = report.summary(found)
        text = report.markdown(result)
        if not quick:
            report.write(result, text, out)  # after each: an interruption loses one program
    print(text)


def results_of(machine: dict[str, Any], out: Path) -> dict[str, Any]:
    """Rows by program, of an earlier run on this machine and commit."""
    path = out / "latest.json"
    if not path.is_file():
        return {}
    earlier = json.loads(path.read_text())
    if earlier["machine"] != machine:
        console.print(f"[yellow]the results in {path} are of {earlier['machine']['commit']}: all is measured anew")
        return {}
    return {row["name"]: row for row in earlier["programs"]}


if __name__ == "__main__":
    typer.run(main)
