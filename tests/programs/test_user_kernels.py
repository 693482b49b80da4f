"""Triton kernels that a program launches itself, by Triton's interpreter (`tests/gpu/test_user_kernels.py` has the same on a GPU)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="C8: Triton is not installed")

SCRIPT = Path(__file__).parents[1] / "support" / "user_kernels.py"
NAMES = [
    "new tensor", "grid function", "in place", "in place, read before", "copy of an input", "an input", "an input twice", "a view",
    "a view of an input", "columns", "the same twice", "halves", "expanded", "transposed", "two results", "optimizer", "autotuned",
    "no elements", "under autograd", "a function with gradient", "a checkpointed function", "without results",
]  # fmt: skip
ONCE = [
    "in a branch",
    "overlapping inputs",
    "functional form",
    "kernels that print",
    "an input with gaps",
    "an address from memory",
]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """What differs from eager, by program. (A process of its own: Triton reads the variable when it is loaded.)"""
    path = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    told: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("name", [*NAMES, *(f"{name}, symbolic" for name in NAMES), *ONCE])
def test_as_eager(found: dict[str, str], name: str) -> None:
    assert found[name] == ""


def test_every_program_is_looked_at(found: dict[str, str]) -> None:
    assert sorted(found) == sorted([*NAMES, *(f"{name}, symbolic" for name in NAMES), *ONCE])
