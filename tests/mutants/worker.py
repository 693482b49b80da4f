"""One worker process: reads names of entries from its standard input, runs their mutants, and writes one line of JSON for each."""

from __future__ import annotations

import functools
import json
import logging
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from opforge.generator.load import Entry
from opforge.generator.model import Model
from opforge.generator.run import load_model

from .files import EMITTERS, FileTests
from .ops import Known, NotCompilable, OpTests
from .rewrites import RuleTests
from .scalars import ScalarTests
from .sites import Mutant, mutants_of

LIMIT_S = 30
"""Seconds for the tests of one mutant of an operator or a rewrite; one that takes longer (an endless loop) counts as killed."""


class _Late(BaseException):
    """A mutant's tests take too long."""


def chosen(mutants: list[Mutant], sample: float, seed: int) -> list[Mutant]:
    """The share `sample` of the mutants, always the same for a seed: a mutant is in it or not whatever the others are."""
    return [m for m in mutants if random.Random(f"{seed} {m.key}").random() < sample]


class Worker:
    """Holds the model of the right specs, and the prepared tests of the entry that it works on."""

    def __init__(self, sample: float, seed: int) -> None:
        self.base: Model = load_model()
        self.sample, self.seed = sample, seed
        self.commutative = {e.id for e in self.base.entries("scalars") if e.get("commutative")}
        self.known = Known.of(self.base)

    def run(self, kind: str, name: str, done: set[str], say: Callable[[dict[str, Any]], None], tag: str = "") -> None:
        """All chosen mutants of an entry but those whose keys are in `done`. `tag` tells entries of one name apart."""
        entry = next(e for e in self.base.entries(kind) if e.id == name and tag in ("", e.tag))
        wanted = [
            m
            for m in chosen(list(mutants_of(entry, kind, self.commutative)), self.sample, self.seed)
            if m.key not in done
        ]
        tests: Any = None
        for mutant in wanted:
            start = time.monotonic()
            if tests is None:
                tests = self.tests(kind, entry)
            limit = _limit(kind, tests)
            status, by = _status(functools.partial(tests.killed_by, mutant.of(entry)), limit)
            say(
                {
                    "key": mutant.key,
                    "file": mutant.file,
                    "entry": mutant.entry,
                    "path": ".".join(map(str, mutant.path)),
                    "what": mutant.what,
                    "inside": " ".join(mutant.inside),
                    "gone": " ".join(mutant.gone),
                    "shown": mutant.show(),
                    "status": status,
                    "by": by,
                    "seconds": round(time.monotonic() - start, 3),
                }
            )

    def tests(self, kind: str, entry: Entry) -> Any:
        """The prepared tests of an entry."""
        if kind == "rewrites":
            return RuleTests(entry, self.base)
        if kind == "scalars":
            return ScalarTests(entry, self.base)
        if kind in EMITTERS:
            return FileTests(kind, entry, self.base)
        made = OpTests(entry, self.base, self.known)
        made.prepare()
        return made


def _limit(kind: str, tests: Any) -> int:
    """Seconds for the tests of one mutant; 0 where these have a limit of their own."""
    if kind in EMITTERS or getattr(tests, "routines", ()):
        return 0
    return 4 * LIMIT_S if kind == "scalars" else LIMIT_S


def _status(run: Callable[[], str | None], limit: int) -> tuple[str, str]:
    def late(signum: int, frame: object) -> None:
        raise _Late

    signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    try:
        found = run()
        return ("survived", "") if found is None else ("killed", " ".join(found.split())[:200])
    except NotCompilable as error:
        return "refused", " ".join(str(error).split())[:200]
    except _Late:
        return "killed", "takes too long"
    finally:
        signal.alarm(0)


def main() -> None:
    """`worker SAMPLE SEED`; each line of the input is JSON: [kind, entry, keys that are done]."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # torch's fake tensors print the errors that wrong replacements make
    torch.set_num_threads(1)
    worker = Worker(float(sys.argv[1]), int(sys.argv[2]))

    def say(report: dict[str, Any]) -> None:
        print(json.dumps(report), flush=True)

    for line in sys.stdin:
        kind, name, tag, done = json.loads(line)
        try:
            worker.run(kind, name, set(done), say, tag)
        except Exception as error:  # noqa: BLE001 - the tests of the right entry do not run here
            file = next(e.source.name for e in worker.base.entries(kind) if e.id == name)
            say({"entry": name, "file": file, "status": "error", "by": f"{type(error).__name__}: {error}"})
        say({"entry": name, "status": "done"})


if __name__ == "__main__":
    main()
