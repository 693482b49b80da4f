"""The setting `sanitize`: does it see what it is there for? (`make test-asan` runs the suites under it.)"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import opforge
from opforge.errors import BuildError
from opforge.runtime.build.toolchain import find_toolchain, runs_here


def _library() -> str:
    """What is loaded before all others: the sanitizer's library, and the one that has what it looks for at once. "" where g++ is without."""
    if shutil.which("g++") is None or not runs_here("avx2"):
        return ""
    ask = ["g++", "-print-file-name="]
    told = [
        subprocess.run([ask[0], ask[1] + name], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    return " ".join(told) if all(Path(file).is_absolute() for file in told) else ""


def test_without_its_library_it_is_refused() -> None:
    """The process would end when the first kernel is loaded."""
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the library is there")
    with opforge.config.patch({"sanitize": "address"}), pytest.raises(BuildError, match=r"LD_PRELOAD|g\+\+ on Linux"):
        find_toolchain(opforge.config.current())


@pytest.mark.slow
def test_kernels_that_leave_their_buffers_are_reported(root: Path, tmp_path: Path) -> None:
    """Vectors, the lanes of the last one (whose instructions the sanitizer does not see), inputs, results, and intermediate values, which
    otherwise share a block of memory.
    """
    if not (library := _library()):
        pytest.skip("g++ has no libasan here, or the processor no AVX2")
    environment = {
        **os.environ,
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0",
        "OPFORGE_SANITIZE": "address",
        "OPFORGE_CXX": "env -u LD_PRELOAD g++",
        "OPFORGE_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "tests.support.faulty_kernels"]
    ran = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    write, read = "reported WRITE", "reported READ"
    assert dict(line.split(": ") for line in ran.stdout.splitlines()) == {
        "right": "well",
        "a vector too many": read,
        "a lane too many is written": write,
        "a lane too many is read": read,
        "an element before is read": read,
        "beyond an intermediate value": write,
    }
