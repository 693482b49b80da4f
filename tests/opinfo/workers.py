"""Runs cases in worker processes, so that one that crashes or hangs is an outcome and not the end."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.fuzz.workers import lines_of

from .database import Case
from .worker import lost

# A process grows with every library that it loads; a fresh one now and then keeps it small.
_CASES_PER_PROCESS = 120


def run_all(
    cases: Sequence[Case],
    folder: Path,
    *,
    jobs: int = 1,
    limit: int = 0,
    timeout: float = 180.0,
    worker: str = "tests.opinfo.worker",
) -> Iterator[dict[str, Any]]:
    """The report of each case, as they come; in `jobs` processes. `limit`: calls of one case (0: all); `worker` is
    the module that the processes run.
    """
    todo: queue.Queue[list[Case]] = queue.Queue()
    size = max(1, min(_CASES_PER_PROCESS, -(-len(cases) // jobs)))
    for k in range(0, len(cases), size):
        todo.put(list(cases[k : k + size]))
    reports: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def serve(number: int) -> None:
        try:
            while True:
                left = todo.get_nowait()
                while left:
                    left = _run_process(left, reports, folder, number, [worker, str(limit)], timeout)
        except queue.Empty:
            pass
        finally:
            reports.put(None)

    for number in range(jobs):
        threading.Thread(target=serve, args=(number,), daemon=True).start()
    running = jobs
    while running:
        made = reports.get()
        if made is None:
            running -= 1
        else:
            yield made


def _run_process(
    cases: list[Case], reports: queue.Queue[Any], folder: Path, number: int, worker: list[str], timeout: float
) -> list[Case]:
    """Run cases in one process; returns those that are left after one that ended it."""
    file = folder / f"cases_{number}.json"
    file.write_text(json.dumps([asdict(c) for c in cases]))
    command = [sys.executable, "-m", worker[0], str(file), str(folder), worker[1]]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reader.start()
    left = dict.fromkeys(cases)
    at, where = cases[0], "starting"
    for line in lines_of(process, timeout):
        if not line.startswith("{"):
            continue
        said = json.loads(line)
        if "at" in said:
            at, where = Case(**said["at"]), said["label"]
        else:
            reports.put(said)
            del left[Case(**said["case"])]
    status = process.wait()
    reader.join(5)
    if left:
        outcome = "hang" if status == -9 else "crash"
        reports.put(lost(at, outcome, where, f"exit status {status}: {''.join(errors[-6:])[-600:]}"))
        left.pop(at, None)
    return list(left)
