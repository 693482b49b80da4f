"""What specs/scalars/reductions.yaml declares of NaN, ties and running totals holds on both targets (Triton's by its interpreter)."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opforge  # noqa: F401
from opforge.generated.scalars import REDUCTIONS, SCANS, Reduction

ROOT = Path(__file__).resolve().parents[2]
ENTRIES: dict[str, Reduction] = {
    **{f"reduction {n}": r for n, r in REDUCTIONS.items() if r.torch},
    **{f"scan {n}": r for n, r in SCANS.items() if r.torch},
}
TOTALS = [name for name, r in ENTRIES.items() if r.cpp is not None and r.combine in ("add", "mul")]
LONG = 1 << 16
NAN = float("nan")


def program(name: str) -> Callable[[Tensor], Tensor]:
    """torch's function along rows."""
    path = str(ENTRIES[name].torch).removeprefix("torch.")

    def run(x: Tensor) -> Tensor:
        found = getattr(torch, path)(x, 1)
        return found if isinstance(found, Tensor) else found[0]

    return run


def long_row(name: str, block: int) -> Tensor:
    """A row whose total is exact in float64, and in float32 loses what comes after the first element: little of it, so that a block's sum is lost
    whole.
    """
    if ENTRIES[name].combine == "mul":
        return torch.full((1, LONG), 1 + 2.0**-23)
    x = torch.full((1, LONG), float(63 // max(block, 1)))
    if name.startswith("scan"):  # inside of a tile nothing is lost
        x[:] = 2.0**-6
        x[0, : LONG // 4] = 0
    x[0, 0] = 2.0**30  # whose neighbours are 64 and 128 away
    return x


def few_rows() -> Tensor:
    """NaN twice, NaN at the end, ties alone, one number."""
    x = torch.arange(160.0).reshape(4, 40) % 7 - 3
    x[0, 5] = x[0, 9] = x[1, 39] = NAN
    return x


def compiled(name: str, x: Tensor) -> Tensor:
    torch._dynamo.reset()
    found: Tensor = torch.compile(program(name), backend="opforge", fullgraph=True)(x)
    return found


def units(name: str, found: Tensor, x: Tensor) -> float:
    """How far the last result is from the true one, in units of float32."""
    true = program(name)(x.double())[..., -1:].flatten()[0].item()
    return abs(found[..., -1:].flatten()[0].item() - true) / (abs(true) * 2.0**-23)


def check_nan_and_ties(name: str, found: Tensor, x: Tensor) -> None:
    entry = ENTRIES[name]
    nan = x.isnan()
    if entry.nan == "first":
        assert found[:2].tolist() == [5, 39]
    elif name.startswith("scan"):
        assert torch.equal(found.isnan(), nan.cumsum(1) > 0)
    else:
        assert torch.equal(found.isnan(), nan.any(1))
    if entry.ties == "first":
        best = x[2] == (x[2].max() if program(name)(x[2:]).tolist() == x[2:].argmax(1).tolist() else x[2].min())
        assert found[2].item() == best.nonzero()[0].item()


@pytest.mark.parametrize("name", [n for n, r in ENTRIES.items() if r.nan or r.ties])
def test_nan_and_ties(name: str) -> None:
    x = few_rows()
    check_nan_and_ties(name, compiled(name, x), x)


def test_every_reduction_of_floats_says_what_a_nan_does() -> None:
    silent = [n for n, r in ENTRIES.items() if r.args != ("bool",) and not r.nan]
    assert not silent, silent


@pytest.mark.parametrize("name", TOTALS)
def test_totals_of_cpp(name: str) -> None:
    declared = ENTRIES[name].cpp
    assert declared is not None
    x = long_row(name, declared.block)
    off = units(name, compiled(name, x), x)
    # One lane loses a block beside the first element; in float32 it would lose all of its elements.
    assert (off < 4) == (declared.total == "float64"), off


def test_compensated_totals() -> None:
    """What a total of float64 loses is kept beside it: a thousand values that are each too small for it."""
    assert REDUCTIONS["sum"].cpp is not None
    assert "float64" in REDUCTIONS["sum"].cpp.compensated
    x = torch.full((1, LONG), 0.5 / 16, dtype=torch.float64)
    x[0, 0] = 2.0**53
    true = 2**53 + (LONG - 1) / 32
    assert abs(compiled("reduction sum", x).item() - true) <= 2


# -- Triton ------------------------------------------------------------------------------------------------------------
SHOWN = ["reduction sum", "scan sum"]  # what a product loses from tile to tile does not show
TRITON = [name for name in ENTRIES if name not in ("scan max", "scan min")]  # running maxima are eager's on a GPU
INTERPRETED = """
import sys, tempfile
from pathlib import Path
import torch
from tests.support.interpreted import interpreted
from tests.unit import test_declared_numerics as here

with tempfile.TemporaryDirectory() as folder, interpreted(Path(folder)):
    found = {}
    for name in here.TRITON:
        found[name] = here.compiled(name, here.few_rows()), None
        if name in here.SHOWN:
            found[name] = found[name][0], here.compiled(name, here.long_row(name, 0))
torch.save(found, sys.argv[1])
"""


@functools.cache
def interpreted_results() -> dict[str, tuple[Tensor, Tensor | None]]:
    pytest.importorskip("triton", reason="C8: Triton is not installed")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.pt"
        environment: dict[str, Any] = {**os.environ, "TRITON_INTERPRET": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", INTERPRETED, str(path)], capture_output=True, text=True, cwd=ROOT, env=environment
        )
        assert done.returncode == 0, done.stderr[-3000:]
        loaded: dict[str, tuple[Tensor, Tensor | None]] = torch.load(path)
        return loaded


@pytest.mark.parametrize("name", [n for n in TRITON if ENTRIES[n].nan or ENTRIES[n].ties])
def test_nan_and_ties_of_triton(name: str) -> None:
    check_nan_and_ties(name, interpreted_results()[name][0], few_rows())


@pytest.mark.parametrize("name", SHOWN)
def test_totals_of_triton(name: str) -> None:
    found, declared = interpreted_results()[name][1], ENTRIES[name].triton
    assert found is not None
    assert declared is not None
    off = units(name, found, long_row(name, 0))
    assert (off < 4) == (declared.total == "float64"), off
