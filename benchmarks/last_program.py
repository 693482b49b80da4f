"""Times long sums whose parts the last program adds up, beside the same with a second kernel, on a CUDA device, in one process.

    python benchmarks/last_program.py              all programs
    python benchmarks/last_program.py --only norm  those whose name contains "norm"

Each program is compiled twice, with tables that differ in `last` only (specs/tuning.yaml), and both are called in turns: the time of a call where
the device waits for the host, the device's own time (launches queued before they run), and that of a replay of a CUDA graph. Results of one kernel
must be the same to the bit in each of many calls and replays, on one stream and on several at once; the exit status is 1 where one is not. "Order":
they are not those of two kernels to the bit, since a block of several rows adds up in another order, but are no less accurate.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer

sys.path.insert(0, str(Path(__file__).parent))

from two_ways import Program, compare

from opforge.generated import tuning
from opforge.runtime.machine import tuning_of
from opforge.runtime.targets.cuda import capability

PROGRAMS: dict[str, tuple[Program, tuple[tuple[int, ...], ...]]] = {
    "sum of 256 thousand": (lambda x: x.sum(), ((512, 512),)),
    "sum of a million": (lambda x: x.sum(), ((1024, 1024),)),
    "sum of 16 million": (lambda x: x.sum(), ((4096, 4096),)),
    "sum of 256 million": (lambda x: x.sum(), ((16384, 16384),)),
    "norm of a million": (lambda x: x.norm(), ((1024, 1024),)),
    "mse of a million": (lambda x, y: F.mse_loss(x, y), ((1024, 1024), (1024, 1024))),
    "mse of 16 million": (lambda x, y: F.mse_loss(x, y), ((4096, 4096), (4096, 4096))),
    "8 rows of a million": (lambda x: x.sum(-1), ((8, 1 << 20),)),
    "maxima of 32 rows": (lambda x: x.amax(-1), ((32, 1 << 18),)),
}


@contextmanager
def table(last: tuning.Last | None) -> Iterator[None]:
    """The table of this GPU with another rule for last programs."""
    mine = capability(torch.cuda.current_device())
    known = min(tuning.TUNING, key=lambda k: (abs(k - mine), k))
    old = tuning.TUNING[known]
    tuning.TUNING[known] = replace(old, last=last)
    tuning_of.cache_clear()
    try:
        yield
    finally:
        tuning.TUNING[known] = old
        tuning_of.cache_clear()


def main(
    only: Annotated[str | None, typer.Option(help="part of the names of programs")] = None,
    rows: Annotated[int, typer.Option(help="`rows` of the rule")] = 256,
    elements: Annotated[int, typer.Option(help="`elements` of the rule")] = 4096,
    out: Annotated[Path | None, typer.Option(help="a file for the table, too")] = None,
) -> None:
    """Long sums with one kernel and with two."""
    ways = {"two": lambda: table(None), "one": lambda: table(tuning.Last(rows, elements))}
    compare(PROGRAMS, ways, (), lambda shape: torch.randn(shape, device="cuda"), only, out)


if __name__ == "__main__":
    typer.run(main)
