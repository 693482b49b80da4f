"""Gives entries to worker processes and collects what they report."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from opforge.generator.diagnostics import did_you_mean
from opforge.generator.run import load_model

from .report import Results
from .sites import mutants_of

KINDS = ("ops", "rewrites", "scalars", "mutations", "decompositions", "random")
"""Kinds of specs that have mutants."""
UNCHANGED = ("enum", "role", "reduction", "scan", "unfold", "inline", "launch", "control")
"""Entries without expressions, and reductions and scans, whose templates of code no test runs alone."""


@dataclass(frozen=True)
class Task:
    """An entry whose mutants are run."""

    kind: str
    file: str
    entry: str
    tag: str = ""


def tasks_of(files: Sequence[str], entries: Sequence[str]) -> list[Task]:
    """All entries that have expressions, or those of `files` and of the names `entries`. Raises LookupError for a name that there is not."""
    model = load_model()
    found = [
        Task(kind, e.source.name, e.id, e.tag)
        for kind in KINDS
        for e in model.entries(kind)
        if e.get("kind") != "extern" and e.tag not in UNCHANGED
    ]
    for name, known in ((n, {t.file for t in found}) for n in files):
        if name not in known:
            raise LookupError(f"no spec file '{name}' has mutants{did_you_mean(name, sorted(known))}")
    for name in entries:
        names = {t.entry for t in found}
        if name not in names:
            raise LookupError(f"no entry '{name}'{did_you_mean(name, sorted(names))}")
    return [t for t in found if (not files or t.file in files) and (not entries or t.entry in entries)]


def count_all() -> int:
    """How many mutants there are."""
    model, tasks = load_model(), {(t.kind, t.entry, t.tag) for t in tasks_of([], [])}
    entries = [(kind, e) for kind in KINDS for e in model.entries(kind) if (kind, e.id, e.tag) in tasks]
    return sum(1 for kind, e in entries for _ in mutants_of(e, kind, set()))


def run_all(tasks: Sequence[Task], results: Results, *, sample: float, seed: int, jobs: int) -> None:
    """Run the tasks in `jobs` processes, add each report to `results`, and print progress."""
    if not tasks:
        return
    todo: queue.Queue[Task] = queue.Queue()
    for task in tasks:
        todo.put(task)
    reports: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threads = [
        threading.Thread(target=_serve, args=(todo, reports, results, sample, seed), daemon=True)
        for _ in range(min(jobs, len(tasks)))
    ]
    for thread in threads:
        thread.start()
    start = shown = time.monotonic()
    done = 0
    for report in _until_done(reports, len(threads)):
        if report["status"] == "done":
            done += 1
        else:
            results.add(report)
        now = time.monotonic()
        if now - shown > 20 and done:
            shown = now
            left = (now - start) / done * (len(tasks) - done)
            print(
                f"# {done} of {len(tasks)} entries, {results.summary()}, {left:.0f} s left", file=sys.stderr, flush=True
            )


def _until_done(reports: queue.Queue[dict[str, Any] | None], count: int) -> Iterator[dict[str, Any]]:
    while count:
        report = reports.get()
        if report is None:
            count -= 1
        else:
            yield report


def _serve(todo: queue.Queue[Task], reports: queue.Queue[Any], results: Results, sample: float, seed: int) -> None:
    process: subprocess.Popen[str] | None = None
    try:
        while True:
            task = todo.get_nowait()
            if process is None or process.poll() is not None:
                command = [sys.executable, "-m", "tests.mutants.worker", str(sample), str(seed)]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([task.kind, task.entry, task.tag, sorted(results.done)]) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith("{"):
                    report = json.loads(line)
                    reports.put(report)
                    if report["status"] == "done":
                        break
            else:
                ended = f"the worker ended: {process.wait()}"
                reports.put({"entry": task.entry, "file": task.file, "status": "error", "by": ended})
                reports.put({"entry": task.entry, "status": "done"})
    except queue.Empty:
        pass
    finally:
        if process is not None and process.poll() is None and process.stdin is not None:
            process.stdin.close()
            process.wait()
        reports.put(None)
