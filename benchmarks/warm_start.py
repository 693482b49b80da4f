"""How long a process with a full cache takes to its first result: MiniLM with each backend, compared with a floor.

    python benchmarks/warm_start.py                   five rounds, each backend once a round in a fresh process
    python benchmarks/warm_start.py --profile FILE    where opforge's part goes: cProfile's numbers of one more process

The floor is torch's backend that compiles nothing (`eager`): torch's imports, the model and Dynamo are what is left. Each process reports its
whole life and its first call; the table has medians, and ratios to the floor. It writes benchmarks/results/warm_start.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "warm_start.json"
BACKENDS = ("floor", "opforge", "inductor")
CHILD = """
import sys, time, json
backend, profile = sys.argv[1:3]
sys.path.insert(0, {examples!r})
import torch, minilm
torch.set_num_threads(2)
model, inputs = minilm.load()
start = time.perf_counter()
run = torch.compile(model, backend="eager" if backend == "floor" else backend)
if profile:
    import cProfile
    profiler = cProfile.Profile()
    profiler.enable()
with torch.no_grad():
    run(*inputs)
if profile:
    profiler.disable()
    profiler.dump_stats(profile)
told = {{"first_call_s": time.perf_counter() - start}}
if backend == "opforge":
    import opforge
    stats = opforge.stats()
    told |= {{"stages": stats["seconds"], "graphs": stats["graphs"], "cache_hits": stats["cache_hits"]}}
print("TOLD", json.dumps(told))
"""


def process(backend: str, folder: Path, profile: str = "") -> dict[str, Any]:
    """One fresh process's seconds; its caches lie in `folder`."""
    text = CHILD.format(examples=str(HERE.parent / "examples"))
    caches = {"OPFORGE_CACHE_DIR": str(folder / "opforge"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    bytecode = {"PYTHONPYCACHEPREFIX": str(folder / "bytecode")}  # which an installed package has
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-c", text, backend, profile],
        env=environment | caches | bytecode | {"OPFORGE_PROGRESS": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    spent = time.perf_counter() - start
    if ran.returncode:
        raise SystemExit(f"the process of {backend} failed:\n{ran.stderr}")
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("TOLD ")]
    return {"process_s": spent, **json.loads(line.removeprefix("TOLD "))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--profile", default="", metavar="FILE", help="write cProfile's numbers of one process of opforge"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    told = parser.parse_args()
    if told.rounds < 1:
        parser.error(f"argument --rounds: expected 1 or more, found {told.rounds}")
    console = Console()
    with tempfile.TemporaryDirectory(prefix="bench-warm-") as name:
        folder = Path(name)
        with console.status("filling the caches"):
            for backend in BACKENDS:
                process(backend, folder)
        runs: dict[str, list[dict[str, Any]]] = {backend: [] for backend in BACKENDS}
        for number in range(told.rounds):
            for backend in BACKENDS[number % 3 :] + BACKENDS[: number % 3]:
                with console.status(f"round {number + 1} of {told.rounds}: {backend}"):
                    runs[backend].append(process(backend, folder))
        if told.profile:
            process("opforge", folder, told.profile)
    missed = [r for r in runs["opforge"] if r["cache_hits"] != r["graphs"]]
    if missed:
        raise SystemExit(f"not a warm start: {missed[0]}")
    summary = {
        b: {k: statistics.median(r[k] for r in rows) for k in ("process_s", "first_call_s")} for b, rows in runs.items()
    }
    table = Table(title="MiniLM, a process with a full cache: medians")
    for column in ("backend", "process", "of the floor's", "first call", "of the floor's"):
        table.add_column(column, justify="right" if column != "backend" else "left")
    for backend, row in summary.items():
        row |= {
            f"{k[:-2]}_ratio": statistics.median(r[k] / f[k] for r, f in zip(runs[backend], runs["floor"], strict=True))
            for k in list(row)
        }
        table.add_row(
            backend,
            f"{row['process_s']:.2f} s",
            f"{row['process_ratio']:.2f}",
            f"{row['first_call_s']:.2f} s",
            f"{row['first_call_ratio']:.2f}",
        )
    console.print(table)
    stages = {
        k: statistics.median(r["stages"].get(k, 0.0) for r in runs["opforge"]) for k in runs["opforge"][0]["stages"]
    }
    console.print("opforge by stage: " + ", ".join(f"{k} {s * 1e3:.0f} ms" for k, s in stages.items() if s > 5e-4))
    told.out.write_text(json.dumps({"summary": summary, "stages": stages, "rounds": told.rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
