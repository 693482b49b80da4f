"""Training spread over two processes (Gloo): losses and gradients as eager's, nothing runs eagerly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

KINDS = ("tensor_parallel", "sequence_parallel", "fsdp2", "ddp")


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_as_eagers(kind: str) -> None:
    command = [sys.executable, "-m", "tests.support.distributed", kind, "--steps", "5"]
    ran = subprocess.run(
        command, cwd=Path(__file__).parents[2], timeout=300, capture_output=True, text=True, errors="replace"
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["losses"] == pytest.approx(found["eager"], rel=1e-5)
    assert found["fallbacks"] == {}
    assert found["graphs"] > 0
