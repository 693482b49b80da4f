"""Runs cases in worker processes, so that one that crashes or hangs is an outcome and not the end."""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.fuzz.workers import ENVIRONMENT, lines_of

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
    seconds: float = math.inf,
) -> Iterator[dict[str, Any]]:
    """The report of each case, as they come; in `jobs` processes. `limit`: calls of one case (0: all); `worker` is
    the module that the processes run. After `seconds` they are ended, and the cases that are left are not reported.
    """
    until = time.monotonic() + seconds
    todo: queue.Queue[list[Case]] = queue.Queue()
    # From all over the tables, so that parts take about as long as each other, and are a sample where time ends them.
    parts = max(-(-len(cases) // _CASES_PER_PROCESS), min(jobs, len(cases)))
    for k in range(parts):
        todo.put(list(cases[k::parts]))
    reports: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def serve(number: int) -> None:
        try:
            while True:
                left = todo.get_nowait()
                while left and time.monotonic() < until:
                    left = _run_process(left, reports, folder, number, [worker, str(limit)], timeout, until)
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
    cases: list[Case],
    reports: queue.Queue[Any],
    folder: Path,
    number: int,
    worker: list[str],
    timeout: float,
    until: float,
) -> list[Case]:
    """Run cases in one process; returns those that are left after one that ended it."""
    file = folder / f"cases_{number}.json"
    file.write_text(json.dumps([asdict(c) for c in cases]))
    command = [sys.executable, "-m", worker[0], str(file), str(folder), worker[1]]
    environment = {**os.environ, **ENVIRONMENT}
    if any(case.device == "interpreter" for case in cases):
        environment["TRITON_INTERPRET"] = "1"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reader.start()
    ending = threading.Timer(max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX)), process.kill)
    ending.daemon = True
    ending.start()
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
    ending.cancel()
    if left and time.monotonic() < until:
        outcome = "hang" if status == -9 else "crash"
        reports.put(lost(at, outcome, where, f"exit status {status}: {''.join(errors[-6:])[-600:]}"))
        left.pop(at, None)
    return list(left)
