"""One worker process: a range of seeds, one line of JSON for each."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.support.lanes import set_lanes

from .check import Outcome, check, kernels_of, quick_builds, reason
from .families import program_of
from .program import Program, runnable
from .shrink import shrink


def report(program: Program, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """What the summary wants to know of a program; a failing one is made smaller first."""
    text = ""
    kinds = list(outcome.kinds)
    if kinds:
        small, found = shrink(program, outcome, seconds) if seconds else (program, outcome)
        text = runnable(small, [f"{kind}: {line}" for kind, line in found.different])
    return {
        "family": program.family,
        "seed": program.seed,
        "kinds": kinds,
        "text": text,
        "eager": reason(outcome.eager) if outcome.eager else "",
        "backward": outcome.backward,
        "externs": outcome.externs,
        "graphs": outcome.graphs,
        "eager_graphs": outcome.eager_graphs,
        "dynamic": program.dynamic,
        "fake_strides": outcome.fake_strides,
        "path": program.path,
        "raised": [f"in {stage.partition(' after')[0]}" for stage in outcome.raised],
    }


def main() -> None:
    """`worker FAMILY FIRST END FOLDER SECONDS DEVICE`"""
    family, first, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    folder, seconds, device = Path(sys.argv[4]), float(sys.argv[5]), sys.argv[6]
    warnings.simplefilter("ignore")
    set_lanes()
    with quick_builds(folder), kernels_of(device, folder):
        for seed in range(first, end):
            program = program_of(family, seed, device)
            print(json.dumps(report(program, check(program), seconds)), flush=True)


if __name__ == "__main__":
    main()
