"""Compares what two commits compile: plans, kernels and wrappers of a fixed set of programs, on machines that need not be there.

    python -m opforge.tools.replay write FOLDER       texts of this tree, a file for each program and machine
    python -m opforge.tools.replay compare REF        this tree against a commit; exit code 1 if a text differs

A move of code shows no difference. After a renaming `--renamed FILE` names a file of lines `old new`: whole words of the old texts are renamed.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track

app = typer.Typer(help=__doc__, no_args_is_help=True, rich_markup_mode=None, add_completion=False)
console = Console()
ROOT = Path(__file__).resolve().parents[2]
SHOWN = 40
"""How many lines of a difference are shown."""
Only = Annotated[str, typer.Option(help="Programs whose name contains this.")]


@app.command()
def write(folder: Path, only: Only = "") -> None:
    """Write the texts of this tree."""
    from .programs import PROGRAMS
    from .record import MACHINES, texts

    chosen = [name for name in PROGRAMS if only in name]
    if not chosen:
        sys.exit(f"no program has {only!r} in its name; there are: {', '.join(PROGRAMS)}")
    for name in track(chosen, "programs", console=Console(stderr=True)):
        for machine in MACHINES:
            torch.manual_seed(0)
            parts = [f"=== {title}\n{text}" for title, text in texts(PROGRAMS[name], machine).items()]
            file = folder / machine / f"{name}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(parts))
    console.print(f"{len(chosen)} programs on {len(MACHINES)} machines are in {folder}")


@app.command()
def compare(
    ref: str,
    only: Only = "",
    renamed: Annotated[Path | None, typer.Option(help="A file of lines `old new`.")] = None,
    keep: Annotated[Path | None, typer.Option(help="A folder for both sets of texts.")] = None,
) -> None:
    """Compare this tree with a commit, by its own replay tool. Exit code 1 if a text differs."""
    words = renames(renamed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        old = Path(scratch) / "tree" / "opforge"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(old), ref], check=True)
        try:
            here = Path(scratch) / "here"
            here.mkdir()
            (here / "opforge").symlink_to(ROOT)
            _write_by(here, folder / "new", only)
            _write_by(old.parent, folder / "old", only)
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)
        if not show(folder / "old", folder / "new", words):
            sys.exit(1)


def _write_by(parent: Path, folder: Path, only: str) -> None:
    """The texts of the tree `parent`/opforge."""
    shutil.rmtree(folder, ignore_errors=True)
    env = {**os.environ, "PYTHONPATH": str(parent), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "opforge.tools.replay", "write", str(folder.resolve()), "--only", only]
    if subprocess.run(command, cwd=parent / "opforge", env=env, check=False).returncode:
        sys.exit(
            f"the replay of {parent / 'opforge'} failed (see above): a program does, or the commit is older than this tool"
        )


def renames(file: Path | None) -> dict[str, str]:
    """Old words and the new ones. Ends the program where a line is not two words."""
    if file is None:
        return {}
    words = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            parts = line.split()
            if len(parts) != 2:
                sys.exit(f"{file}:{number}: expected an old word and a new one, got {line!r}")
            words[parts[0]] = parts[1]
    return words


def show(old: Path, new: Path, words: dict[str, str]) -> bool:
    """Print what differs; whether nothing does."""
    files = [sorted(p.relative_to(folder) for p in folder.rglob("*.txt")) for folder in (old, new)]
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b") if words else None
    differ = 0
    for name in sorted({*files[0], *files[1]}):
        before, after = (
            (f / name).read_text().splitlines() if (f / name).exists() else ["no file"] for f in (old, new)
        )
        if pattern is not None:
            before = [pattern.sub(lambda found: words[found[0]], line) for line in before]
        if before != after:
            differ += 1
            lines = list(difflib.unified_diff(before, after, f"old/{name}", f"new/{name}", lineterm="", n=2))
            console.print("\n".join(lines[:SHOWN]), markup=False, highlight=False)
            if len(lines) > SHOWN:
                console.print(f"… {len(lines) - SHOWN} more lines")
    total = len({*files[0], *files[1]})
    console.print(f"{total} texts: {differ} differ" if differ else f"{total} texts: all the same")
    return not differ


if __name__ == "__main__":
    app()
