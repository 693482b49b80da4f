"""One worker process: the cases of a file, one line of JSON for each. A line before every step tells whom a crash belongs to."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.builds import together
from tests.fuzz.check import quick_builds

from .check import Result, finish, prepare, worst
from .database import Call, Case, calls, quiet, sampled

CHUNK = 64
"""Calls whose kernels are built as one unit: starting a C++ compiler costs more than a small kernel."""


def run(cases: Iterable[Case], limit: int, folder: Path) -> Iterator[dict[str, Any]]:
    """The report of each case, in order, and a line before each step."""
    waiting: list[tuple[Case, list[Call]]] = []
    for case in cases:
        yield {"at": asdict(case), "label": "its samples"}
        try:
            made = sampled(calls(case), limit)
        except Exception as error:  # noqa: BLE001 - the table's own code
            yield report(case, [], f"{type(error).__name__}: {error}")
            continue
        settle(case)
        waiting.append((case, made))
        if sum(len(m) for _, m in waiting) >= CHUNK:
            yield from _flush(waiting, folder)
            waiting = []
    yield from _flush(waiting, folder)


def settle(case: Case) -> None:
    """Wait for the device: an illegal access is told of late, and is to end this process where it happened."""
    if case.memory == "cuda":
        torch.cuda.synchronize()


def _flush(waiting: list[tuple[Case, list[Call]]], folder: Path) -> Iterator[dict[str, Any]]:
    """Compile all calls, at most a chunk of them ahead, and run them."""
    stream = [(case, call) for case, made in waiting for call in made]
    results: dict[Case, list[Result]] = {case: [] for case, _ in waiting}
    left = Counter({case: len(made) for case, made in waiting})
    yield from (report(case, []) for case, made in waiting if not made)
    for start in range(0, len(stream), CHUNK):
        # What is built for a GPU is built kernel by kernel, and found again by all.
        apart = any(case.device != "cpu" for case, _ in stream)
        with (
            tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as units,
            contextlib.nullcontext() if apart else together(Path(units)),
        ):
            ready = []
            for case, call in stream[start : start + CHUNK]:
                yield {"at": asdict(case), "label": f"compiling sample {call.number}: {call.label}"}
                ready.append((case, prepare(call)))
                settle(case)
            for case, prepared in ready:
                yield {
                    "at": asdict(case),
                    "label": f"running sample {prepared.call.number}: {prepared.call.label}",
                }
                results[case].append(finish(prepared))
                settle(case)
                left[case] -= 1
                if not left[case]:
                    yield report(case, results.pop(case))


def report(case: Case, results: list[Result], problem: str = "") -> dict[str, Any]:
    """What the summary wants to know of a case; one without calls says why."""
    why: Counter[str] = Counter()
    for r in results:
        why.update(dict.fromkeys(r.why, 1))
    return {
        "case": asdict(case),
        "outcome": worst(results) if results else "none",
        "problem": problem,
        "calls": dict(Counter(r.outcome for r in results)),
        "kernels": sum(r.kernels for r in results),
        "why": dict(why.most_common()),
        "failures": [
            {"number": r.number, "label": r.label, "outcome": r.outcome, "different": r.different}
            for r in results
            if r.different
        ],
    }


def lost(case: Case, outcome: str, where: str, text: str) -> dict[str, Any]:
    """The report of a case whose process ended."""
    made = report(case, [])
    made["outcome"] = outcome
    made["failures"] = [{"number": -1, "label": where, "outcome": outcome, "different": [(outcome, text)]}]
    return made


def as_gpu(folder: Path, cases: Sequence[Case]) -> contextlib.AbstractContextManager[None]:
    """The interpreter in force, where it is where the cases run."""
    if not any(case.device == "interpreter" for case in cases):
        return contextlib.nullcontext()
    from tests.support.interpreted import interpreted  # loads Triton

    return interpreted(folder)


def main() -> None:
    """`worker FILE FOLDER LIMIT`"""
    cases = [Case(**c) for c in json.loads(Path(sys.argv[1]).read_text())]
    folder = Path(sys.argv[2])
    with quiet(), quick_builds(folder), as_gpu(folder, cases):
        for line in run(cases, int(sys.argv[3]), folder):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
