"""Runs programs in worker processes, so that one that crashes or hangs is a finding and not the end."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HANG_S = 180.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "PASSIVE",
    # glibc then fills new memory, which else may hold the right values of a tensor that is gone.
    "MALLOC_PERTURB_": "170",
}
"""What worker processes have in their environment."""
# A process grows with every library that it loads; a fresh one now and then keeps it small.
_PROGRAMS_PER_PROCESS = 400
_MORE_PATIENCE = 4


@dataclass(frozen=True)
class Range:
    """Seeds of one family that one process is given."""

    family: str
    seeds: range


@dataclass
class FamilyCounts:
    """What came of the programs of one family. Graphs are those of programs that eager does not refuse."""

    programs: int = 0
    differences: int = 0
    graphs: int = 0
    eager_graphs: int = 0

    @property
    def eager_share(self) -> float:
        """The share of graphs that ran eagerly as a whole."""
        return self.eager_graphs / max(self.graphs, 1)


@dataclass
class Summary:
    """Counts over all programs; `ordinary_reasons` are those of programs that eager does not refuse."""

    programs: int = 0
    families: dict[str, FamilyCounts] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    ordinary_reasons: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)

    def add(self, report: dict[str, Any]) -> None:
        """One program's report, as a worker made it."""
        self.programs += 1
        self.counts["left to eager" if report["eager"] else "compiled"] += 1
        self.counts["with a backward"] += report["backward"]
        self.counts["with operators by eager kernels"] += bool(report["externs"])
        self.counts["dynamic shapes"] += report["dynamic"]
        self.counts["through Dynamo"] += report["path"] == "dynamo"
        self.counts["with other strides, as torch's fake tensors say"] += report["fake_strides"]
        self.raised.update(report["raised"])
        counts = self.families.setdefault(report["family"], FamilyCounts())
        counts.programs += 1
        counts.differences += bool(report["kinds"])
        if not report["raised"]:  # a program that eager refuses is not an ordinary one
            counts.graphs += report["graphs"]
            counts.eager_graphs += report["eager_graphs"]
        if report["eager"]:
            self.reasons[f"{report['family']}: {report['eager']}"] += 1
            if not report["raised"]:
                self.ordinary_reasons[f"{report['family']}: {report['eager']}"] += 1
        if report["kinds"]:
            self.kinds[report["kinds"][0]] += 1
            self.failures.append((f"{report['family']}:{report['seed']}", report["kinds"][0]))

    def text(self, seconds: float) -> str:
        """The summary."""
        lines = [f"{self.programs} programs in {seconds:.0f} s: {len(self.failures)} differ from eager"]
        lines.append(f"  {'family':12} {'programs':>9} {'differ':>7} {'graphs':>7} {'eager':>6}")
        for name, c in self.families.items():
            lines.append(f"  {name:12} {c.programs:9} {c.differences:7} {c.graphs:7} {c.eager_share:6.1%}")
        lines += [f"  {n:6} {name} ({n / max(self.programs, 1):.1%})" for name, n in self.counts.most_common()]
        lines += [f"  {n:6} refused by eager: {name}" for name, n in self.raised.most_common()]
        lines += [f"  {n:6} left to eager: {name}" for name, n in self.reasons.most_common(24)]
        lines += [f"  {n:6} DIFFERENT: {name}" for name, n in self.kinds.most_common()]
        lines += [f"  {program}: {kind}" for program, kind in self.failures[:40]]
        return "\n".join(lines)


def run_all(ranges: Sequence[Range], options: Any, folder: Path, summary: Summary) -> None:
    """Run all seeds in `options.jobs` processes; prints progress and failures."""
    todo: queue.Queue[Range] = queue.Queue()
    total = sum(len(r.seeds) for r in ranges)
    size = max(1, min(_PROGRAMS_PER_PROCESS, total // options.jobs + 1))
    for r in ranges:
        for k in range(0, len(r.seeds), size):
            todo.put(Range(r.family, r.seeds[k : k + size]))
    reports: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threads = [
        threading.Thread(target=_serve, args=(todo, reports, folder, options), daemon=True) for _ in range(options.jobs)
    ]
    for thread in threads:
        thread.start()
    start = shown = time.monotonic()
    for report in _until_done(reports, len(threads)):
        summary.add(report)
        if report["kinds"]:
            print(report["text"], flush=True)
            if options.failures is not None:
                options.failures.mkdir(parents=True, exist_ok=True)
                (options.failures / f"{report['family']}_{report['seed']}.py").write_text(report["text"])
        now = time.monotonic()
        if now - shown > 20:
            shown, rate = now, summary.programs / (now - start)
            left = (total - summary.programs) / rate
            print(
                f"# {report['family']}: {summary.programs} of {total}, {len(summary.failures)} differ, {left:.0f} s left",
                flush=True,
            )


def _until_done(reports: queue.Queue[dict[str, Any] | None], count: int) -> Iterator[dict[str, Any]]:
    while count:
        report = reports.get()
        if report is None:
            count -= 1
        else:
            yield report


def _serve(todo: queue.Queue[Range], reports: queue.Queue[Any], folder: Path, options: Any) -> None:
    try:
        while True:
            given = todo.get_nowait()
            seeds = given.seeds
            while seeds:
                seeds = _run_process(given.family, seeds, reports, folder, options)
    except queue.Empty:
        pass
    finally:
        reports.put(None)


def _run_process(
    family: str, seeds: range, reports: queue.Queue[Any], folder: Path, options: Any, patience: int = 1
) -> range:
    """Run seeds of a family in one process; returns those that are left after one that ended it. A program that seems to hang is given more
    time in a second process: on a busy machine the first may just have got no turn.
    """
    words = [family, str(seeds.start), str(seeds.stop), str(folder), str(options.shrink), options.device]
    command = [sys.executable, "-m", "tests.fuzz.worker", *words]
    environment = {**os.environ, **ENVIRONMENT}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reader.start()
    seed = seeds.start
    for line in lines_of(process, patience * HANG_S + options.shrink):
        if line.startswith("{"):
            report = json.loads(line)
            reports.put(report)
            seed = report["seed"] + 1
    status = process.wait()
    reader.join(5)
    if seed < seeds.stop:
        kind = "hang" if status == -9 else "crash"
        if kind == "hang" and patience == 1:
            return _run_process(family, range(seed, seeds.stop), reports, folder, options, _MORE_PATIENCE)
        text = (
            f"# Reproduce: python -m tests.fuzz --family {family} --device {options.device} --seed {seed}\n"
            f"# {kind}: exit status {status}\n{''.join(errors[-12:])}"
        )
        reports.put(_lost(family, seed, kind, text))
        seed += 1
    return range(seed, seeds.stop)


def _lost(family: str, seed: int, kind: str, text: str) -> dict[str, Any]:
    nothing = {
        "eager": "",
        "backward": False,
        "externs": 0,
        "graphs": 0,
        "eager_graphs": 0,
        "dynamic": False,
        "fake_strides": False,
        "path": "",
        "raised": [],
    }
    return {"family": family, "seed": seed, "kinds": [kind], "text": text, **nothing}


def lines_of(process: subprocess.Popen[str], limit: float) -> Iterable[str]:
    """Lines of a process, which is killed where none comes for `limit` seconds."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=limit)
        except queue.Empty:
            process.kill()
            return
        if line is None:
            return
        yield line
