"""Whole steps of training in two processes (Gloo) with captured backwards: as eager's, and captured once (MISSION G3)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KINDS = [
    ["refused", "ddp_in_python-micro-zeros", "ddp_in_python-compiled-breaks"],
    pytest.param(
        ["ddp_in_python-checkpoint", "ddp_in_python-reentrant", "ddp_in_python-reentrant-compiled"],
        marks=pytest.mark.slow,
    ),
    pytest.param(["fsdp2", "fsdp2-compiled-breaks-micro"], marks=pytest.mark.slow),
    ["fsdp2-reentrant", "fsdp2-compiled-checkpoint"],
]


def trained(kinds: list[str], *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.support.captured_steps", *kinds, *options]
    ran = subprocess.run(
        command, cwd=Path(__file__).parents[2], timeout=300, capture_output=True, text=True, errors="replace"
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"kind"')]
    assert [trial["kind"] for trial in found] == kinds
    return found


@pytest.mark.parametrize("kinds", KINDS, ids=" ".join)
def test_steps_are_as_eagers(kinds: list[str]) -> None:
    for found in trained(kinds):
        kind = found["kind"]
        if kind == "refused":
            assert 'optimize_ddp="python_reducer"' in found["message"]
            assert found["none_yet"], "gradients of a backward that was refused"
            continue
        assert found["losses"] == pytest.approx(found["eager"], rel=1e-12), kind
        assert found["parameters"] < 1e-10, kind
        assert found["captures"] == [2 if "micro" in kind else 1] * 20, kind
        assert found["graphs"][0] > 0, kind
        assert len(set(found["graphs"][1:])) == 1, kind
        assert found["fallbacks"] == {}, kind
