"""Vectors of another width than this processor's, so that the loops of AVX-512 (16 lanes) run where there is none (`make test-asan`).

`OPFORGE_TEST_LANES=16` in the environment of the test-suite or of the fuzzer; the compiler takes two instructions for each.
"""

from __future__ import annotations

import os
from dataclasses import replace

from opforge.generated.targets import CpuTarget
from opforge.runtime.config import Config
from opforge.runtime.targets import cpu

NAME = "OPFORGE_TEST_LANES"


def set_lanes() -> None:
    """Have kernels of this process written for, and compiled with, that many lanes, where the environment names a number."""
    lanes = int(os.environ.get(NAME) or 0)
    if not lanes:
        return
    os.environ["OPFORGE_CXX_FLAGS"] = f"{os.environ.get('OPFORGE_CXX_FLAGS', '')} -DOPFORGE_LANES={lanes}".strip()
    own = cpu.cpu_target

    def wide(cfg: Config) -> CpuTarget:
        target = own(cfg)
        return replace(target, name=f"{target.name} with {lanes} lanes", lanes=lanes)

    cpu.cpu_target = wide
