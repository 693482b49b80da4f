"""A processor and a GPU that exist as spec entries alone: `make generate`, and programs run on them.

The package is copied, two files are put into its `specs/targets`, and nothing else is written by hand.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from opforge.runtime.build.toolchain import runs_here

ROOT = Path(__file__).parents[2]
COPIED = ("report", "specs", "generated", "generator", "runtime", "testing", "docs", "tests/support", "tests/generated")
SMALL_CACHE = """\
- target: tests_small_cache
  doc: "AVX2 with an eighth of the caches."
  device: cpu
  lanes: 8
  guard: __AVX2__
  flags: ["-march=x86-64-v3"]
  architecture: x86_64
  features: [abm, avx2, bmi1, bmi2, f16c, fma, movbe]
  limits: {line: 64}
  budgets: {tile: 4096, scratch: 2048, strips: 4096, edge: 64, column: 16, sums: 2, near: 2, inner: 16}
  costs: {recompute: 0, in_phase: 2, often: 4, cached: 4096, factor: 16, allocation: 4096}
"""
SMALL_GPU = """\
- target: sm_91
  doc: "A GPU that nobody built: few registers, and long launches."
  device: cuda
  capability: 91
  features: [tf32]
  limits: {line: 64, warp: 32, warps: 8, register: 4, vector: 8, sector: 16, arguments: 2048, mma: {edge: 32, steps: 64}}
  budgets:
    {tile: 4096, scratch: 16384, row: 1024, column: 64, accumulated_row: 512,
     head: 64, short_column: 16, edge: 16, least_edge: 8, in_flight: 2}
  costs:
    recompute: 16
    in_phase: 4
    often: 4
    cached: 8192
    factor: 32
    elsewhere: 8
    programs: 4
    share: 2
    alone: 2048
    launch_bytes: 4096
    launch_points: 8192
    padded: 65536
    allocation: 4096
    layout: 1024
    prologue: 4
    idle: 64
    split: {values: 4096, cost: 4, row: 256, column: 16, rows: 2, elements: 128, parts: 1024, columns: 16}
    cooperative: {steps: 256, points: 4096}
    group: {tree: 2, members: 16}
"""
PROGRAMS = """
import json, sys, tempfile
from pathlib import Path
import torch
import opforge
from opforge.runtime.compile_fx import HISTORY

def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))

PROGRAMS = {
    "transpose": (lambda x, y: x.t() + y, (normal(300, 200), normal(200, 300))),
    "softmax": (lambda x: torch.softmax(x, -1), (normal(7, 3001),)),
    "softmax of short rows": (lambda x: torch.softmax(x * 2, -1), (normal(300, 33),)),
    "layer norm": (lambda x: torch.nn.functional.layer_norm(x.exp(), (1500,)), (normal(40, 1500),)),
    "columns": (lambda x: ((x.sin() * x).sum(0), x.argmax(0)), (normal(90, 4100),)),
    "long sum": (lambda x: (x * x).sum(), (normal(60000),)),
    "rows and columns": (lambda x: (x.sum(0), x.amax(1), x.t().contiguous() * 2), (normal(257, 65),)),
    "running sum": (lambda x: x.cumsum(-1), (normal(20, 500),)),
    "whole numbers": (lambda x: (x * 100).to(torch.int64).remainder(7).sum(-1), (normal(50, 77),)),
    "sort": (lambda x: torch.sort(x, -1).values, (normal(9, 60),)),
}

def texts():
    found = {}
    for name, (program, inputs) in PROGRAMS.items():
        torch._dynamo.reset()
        before = len(HISTORY)
        got = torch.compile(program, backend="opforge", options={"strict": True, "cache": False})(*inputs)
        want = program(*inputs)
        for a, b in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, msg=lambda text: f"{name}: {text}")
        found[name] = "".join(a.cpp for a in HISTORY[before:])
    return found
"""
ON_A_PROCESSOR = """
from tests.support.lanes import set_lanes
set_lanes()
print(json.dumps(texts()))
"""
ON_A_GPU = """
from opforge.generated.targets import GPU_TARGETS
from opforge.runtime.machine import Gpu, gpu_target
from tests.support.interpreted import interpreted

assert gpu_target(91).name == "sm_91"
with tempfile.TemporaryDirectory() as folder, interpreted(Path(folder), Gpu(GPU_TARGETS[sys.argv[1]], num_sms=12)):
    print(json.dumps(texts()))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package that knows two machines more, generated anew; its folder is called opforge."""
    folder = tmp_path_factory.mktemp("machines") / "opforge"
    folder.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(path, folder)
    (folder / "specs" / "targets" / "tests_small_cache.yaml").write_text(SMALL_CACHE)
    (folder / "specs" / "targets" / "sm_91.yaml").write_text(SMALL_GPU)
    said = ran(folder, "-m", "opforge", "generate")
    assert [line.split()[1] for line in said.splitlines()] == [
        "docs/settings.md",
        "generated/config.py",
        "generated/targets.py",
    ]
    return folder


def ran(package: Path, *arguments: str, **settings: str) -> str:
    """What a process with that package writes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package.parent), str(package)]), **settings}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=package, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def texts(package: Path, last: str, *arguments: str, **settings: str) -> dict[str, str]:
    """The kernels of the programs, whose results were right."""
    said = ran(package, "-c", PROGRAMS + last, *arguments, **settings)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only")
@pytest.mark.parametrize("lanes", ["0", "16"])
def test_a_processor_of_its_own_file(package: Path, lanes: str) -> None:
    """As it is, and with vectors of twice the size, each of which is two of the processor's."""
    if not runs_here("avx2"):
        pytest.skip("C8: this processor has no AVX2")
    small, large = (
        texts(package, ON_A_PROCESSOR, OPFORGE_TARGET=name, OPFORGE_TEST_LANES=lanes)
        for name in ("tests_small_cache", "avx2")
    )
    differ = {name for name, text in small.items() if text != large[name]}
    assert {"transpose", "columns"} <= differ, "smaller tiles"
    assert "whole numbers" not in differ


def test_a_gpu_of_its_own_file(package: Path) -> None:
    pytest.importorskip("triton", reason="C8: Triton is not installed")
    small, large = (texts(package, ON_A_GPU, name, TRITON_INTERPRET="1") for name in ("sm_91", "sm_90"))
    differ = {name for name, text in small.items() if text != large[name]}
    assert {"transpose", "softmax", "long sum"} <= differ, "smaller tiles, loops over rows, more parts"
    assert small["long sum"].count("def ") > large["long sum"].count("def "), "a sum in two steps"
