"""Whole steps of training on two GPUs (NCCL) with captured backwards: as eager's, and captured once (MISSION G3). `make test-gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="C8: fewer than two CUDA devices"),
]

KINDS = [
    ["ddp_in_python", "ddp_in_python-compiled-breaks", "ddp_in_python-compiled-micro"],
    ["fsdp2", "fsdp2-compiled-breaks", "fsdp2-compiled-micro"],
    ["ddp_in_python-checkpoint", "ddp_in_python-reentrant-compiled"],
    ["fsdp2-compiled-checkpoint", "fsdp2-reentrant"],
]


@pytest.mark.parametrize("kinds", KINDS, ids=" ".join)
def test_steps_are_as_eagers(kinds: list[str]) -> None:
    command = [sys.executable, "-m", "tests.support.captured_steps", *kinds, "--device", "cuda"]
    ran = subprocess.run(
        command, cwd=Path(__file__).parents[2], timeout=300, capture_output=True, text=True, errors="replace"
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    trials = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"kind"')]
    assert [trial["kind"] for trial in trials] == kinds
    for found in trials:
        kind = found["kind"]
        assert found["losses"] == pytest.approx(found["eager"], rel=1e-10), kind
        assert found["parameters"] < 1e-8, kind
        assert found["captures"] == [2 if "micro" in kind else 1] * 20, kind
        assert len(set(found["graphs"][1:])) == 1, kind
        assert found["fallbacks"] == {}, kind


def test_the_usual_reducer_is_refused() -> None:
    """DDP's reducer in C++ cannot be captured: an error says what to set, and the backward can still be run without capture."""
    command = [sys.executable, "-m", "tests.support.captured_steps", "refused", "--device", "cuda"]
    ran = subprocess.run(
        command, cwd=Path(__file__).parents[2], timeout=300, capture_output=True, text=True, errors="replace"
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert 'optimize_ddp="python_reducer"' in found["message"]
    assert found["none_yet"]
