"""The edge cases of operators by the plans and kernels of a GPU, in Triton's interpreter: `python -m tests.support.edge_interpreted ID…`.

Bfloat16 is left out, whose subnormal numbers the interpreter takes for zeros, and float64, whose fused multiply-add it rounds twice.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.int64, torch.int8, torch.bool)


def check_interpreted(ids: Sequence[str]) -> None:
    """Raises AssertionError with what differs; in a process of its own, which loads Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.support.edge_interpreted", *ids]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]


def _main(ids: Sequence[str]) -> None:
    import numpy as np

    from tests.generated.test_edges import EITHER_ZERO, ENTRIES

    from .edge_check import check_edges
    from .interpreted import interpreted

    with tempfile.TemporaryDirectory() as folder, interpreted(Path(folder)), np.errstate(all="ignore"):
        for name in ids:
            check_edges([ENTRIES[name]], EITHER_ZERO, DTYPES)


if __name__ == "__main__":
    _main(sys.argv[1:])
