"""Times short reductions to one value by one program, beside the same in parts by several and a second kernel, on a CUDA device, in one process.

    python benchmarks/short_sums.py                all programs
    python benchmarks/short_sums.py --only stack   those whose name contains "stack"

Each program is compiled twice, with limits (`costs.split.values` of specs/targets) that let no reduction be cut, and every one of two parts
or more: what an element costs is not asked. Otherwise as last_program.py. "Differs" says "order": parts are added up in another.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from unittest import mock

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from two_ways import Program, compare

from opforge.runtime.machine import Gpu
from opforge.runtime.targets import cuda

THOUSANDS = 8, 32, 128
STEPS = 24


def stacked(x: Tensor, y: Tensor) -> Tensor:
    """The loss of a recurrent network: as many values as steps are read in turns."""
    return F.mse_loss(torch.stack([torch.tanh(h) * torch.sigmoid(h) for h in x.unbind(0)]), y)


def entropy(x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, y)


def shapes(thousands: int, count: int) -> tuple[tuple[int, ...], ...]:
    return ((thousands * 1024,),) * count


PROGRAMS: dict[str, tuple[Program, tuple[tuple[int, ...], ...]]] = {
    **{f"sum of {n} thousand": (lambda x: x.sum(), shapes(n, 1)) for n in THOUSANDS},
    **{f"mse of {n} thousand": (lambda x, y: F.mse_loss(x, y), shapes(n, 2)) for n in THOUSANDS},
    **{f"entropy of {n} thousand": (entropy, shapes(n, 2)) for n in THOUSANDS},
    **{f"stack of {n} rows of 128": (stacked, ((STEPS, n, 128),) * 2) for n in (2, 8, 16, 32)},
}


def with_values(count: int) -> Callable[[int], Gpu]:
    """The devices, of which one step may reduce so many values without a second."""
    known = cuda.gpu_of

    def found(index: int) -> Gpu:
        gpu = known(index)
        costs = replace(gpu.costs, split=replace(gpu.costs.split, values=count))
        return replace(gpu, target=replace(gpu.target, costs=costs))

    return found


def main(
    only: Annotated[str | None, typer.Option(help="part of the names of programs")] = None,
    out: Annotated[Path | None, typer.Option(help="a file for the table, too")] = None,
) -> None:
    """Short reductions with one kernel and with two."""
    ways = {
        "one": lambda: mock.patch.object(cuda, "gpu_of", with_values(1 << 60)),
        "parts": lambda: mock.patch.object(cuda, "gpu_of", with_values(0)),
    }
    compare(PROGRAMS, ways, (), lambda shape: torch.randn(shape, device="cuda"), only, out)


if __name__ == "__main__":
    typer.run(main)
