"""What a call and a first call cost in this tree and in a commit before it, by fresh processes of both in turn.

    python tools/against.py REF                    five programs, five rounds (seven minutes on an idle machine)
    python tools/against.py REF --rounds 9 minilm  one program

Both are measured by this tree's benchmarks: `overhead.py` (a call of a small graph above the floor, as a part of Inductor's) and `cold.py`
(seconds of opforge's imports and inside the backend, in a process with empty caches). The table has medians and this tree over the commit; it
goes to benchmarks/results/against.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "against.json"
PROGRAMS = ["minilm", "resnet18", "lstm_loop", "layernorm", "rotary"]
console = Console()
Measured = dict[str, list[float]]
"""A measure's name and one value a round."""


def main(
    ref: Annotated[str, typer.Argument(help="The commit before.")],
    programs: Annotated[list[str] | None, typer.Argument(help="Names of programs of benchmarks/programs.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Processes of each kind and tree.")] = 5,
) -> None:
    """Print what a call and a cold start cost here, in the commit, and their ratio."""
    git = ["git", "-C", str(ROOT)]
    with tempfile.TemporaryDirectory() as scratch:
        old, here = (Path(scratch) / name / "opforge" for name in ("old", "here"))
        here.parent.mkdir()
        here.symlink_to(ROOT)
        if subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(old), ref], check=False).returncode:
            raise SystemExit(f"{ref} is no commit of this repository (see above)")
        try:
            found: dict[str, Measured] = {"before": {}, "now": {}}
            for number in track(range(rounds), "rounds", console=Console(stderr=True)):
                # In turn, and the other one first in the next round: a slow minute of the machine meets both.
                trees = [("before", old), ("now", here)]
                for name, tree in trees if number % 2 else reversed(trees):
                    for measure, value in measured(tree, programs or PROGRAMS):
                        found[name].setdefault(measure, []).append(value)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(old)], check=True)
        commits = {
            name: subprocess.run(
                [*git, "rev-parse", "--short", at], capture_output=True, text=True, check=True
            ).stdout.strip()
            for name, at in (("before", ref), ("now", "HEAD"))
        }
    RESULTS.write_text(json.dumps({"commits": commits, "rounds": rounds, **show(found, commits)}, indent=1) + "\n")


def measured(tree: Path, programs: list[str]) -> Iterator[tuple[str, float]]:
    """One value of each measure, by processes of `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "overhead.json"
        call(tree, "overhead.py", "--rounds", "15", "--out", str(out))
        result = json.loads(out.read_text())
    for kind in ("inference", "training"):
        above = result[kind]["us_above_floor"]
        # Of Inductor's in the same process: a processor that is slower for a minute is so for both.
        yield f"{kind}, a call above the floor, of Inductor's", above["opforge"] / above["inductor"]
    for program in programs:
        row = json.loads(call(tree, "cold.py", program, "opforge"))
        # Together: what one tree imports at its start another may import in its first compilation.
        yield f"{program}, s of imports and compilation", row["import_s"] + row["backend_s"]


def call(tree: Path, script: str, *arguments: str) -> str:
    """What a benchmark prints that runs with `tree`'s opforge; its errors are shown and end the program."""
    env = {**os.environ, "PYTHONPATH": str(tree.parent)}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def show(found: dict[str, Measured], commits: dict[str, str]) -> dict[str, Any]:
    """Print the table; the medians of each measure."""
    table = Table("", *(f"{name} ({commits[name]})" for name in found), "ratio")
    medians: dict[str, Any] = {}
    for measure in found["now"]:
        row = {name: statistics.median(values[measure]) for name, values in found.items()}
        medians[measure] = row
        ratio = statistics.median(a / b for a, b in zip(found["now"][measure], found["before"][measure], strict=True))
        row["ratio"] = ratio
        table.add_row(measure, *(f"{row[name]:.2f}" for name in found), f"{ratio:.2f}")
    ratios = statistics.geometric_mean(row["ratio"] for row in medians.values())
    table.add_section()
    table.add_row("geometric mean", "", "", f"{ratios:.2f}")
    console.print(table)
    return {"medians": medians}


if __name__ == "__main__":
    typer.run(main)
