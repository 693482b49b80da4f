"""Training spread over two GPUs (NCCL): losses and gradients as eager's, nothing runs eagerly. `make test-gpu`."""

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


@pytest.mark.parametrize("kind", ["tensor_parallel", "sequence_parallel", "fsdp2", "ddp"])
def test_losses_are_as_eagers(kind: str) -> None:
    command = [sys.executable, "-m", "tests.support.distributed", kind, "--device", "cuda"]
    ran = subprocess.run(
        command, cwd=Path(__file__).parents[2], timeout=300, capture_output=True, text=True, errors="replace"
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["losses"] == pytest.approx(found["eager"], rel=1e-4)
    assert found["fallbacks"] == {}
    assert found["graphs"] > 0
