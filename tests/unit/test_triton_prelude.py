"""Reductions and scans of the Triton prelude, in Triton's interpreter, against torch: NaN and ties included."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest
import torch

from opforge.generated.scalars import REDUCTIONS, SCANS
from opforge.generated.triton_scalars import TRITON_COMBINE, TRITON_REDUCTIONS
from tests.support.scalars import CLASSES, ROOT

DTYPES = {"float": "float32", "int": "int64", "bool": "bool"}
KEYS = [
    (kind, name, dtype)
    for kind, table in (("reduce", REDUCTIONS), ("scan", SCANS))
    for name, r in table.items()
    for c in r.args[:1]
    for k in CLASSES.get(c, (c,))
    if not ((dtype := DTYPES[k]) == "bool" and (name in ("sum", "prod", "xor_sum") or kind == "scan"))
]

RUNNER = """
import sys, torch, reductions
data = torch.load(sys.argv[1])
out = {}
for key, x in data.items():
    r = torch.empty_like(x) if key.startswith("scan") else torch.empty(x.shape[0], dtype=torch.int64 if "arg" in key else x.dtype)
    getattr(reductions, key)[(x.shape[0],)](x, r, x.shape[1], BLOCK=64)
    out[key] = r
torch.save(out, sys.argv[2])
"""


def values(dtype: str) -> torch.Tensor:
    """Six rows: ties, NaN early, late and twice, extremes."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-3, 4, (6, 45), generator=generator)
    if dtype == "bool":
        return torch.stack([x[0] > 2, x[1] > 9, x[2] > -9, x[3] == 1, x[4] != 0, x[5] < 0])
    if dtype == "float32":
        f = x.float() / 2
        f[1, 0] = f[2, 44] = f[3, 7] = f[3, 9] = float("nan")
        f[4, 3], f[4, 5] = float("inf"), -float("inf")
        return f
    x[4, 3], x[5, 5] = 2**63 - 1, -(2**63)
    return x


def expected(kind: str, name: str, x: torch.Tensor) -> torch.Tensor:
    """torch's answer along the rows."""
    if kind == "scan":
        done = {
            "sum": torch.cumsum,
            "prod": torch.cumprod,
            "max": torch.cummax,
            "min": torch.cummin,
            "logaddexp": torch.logcumsumexp,
        }
        r = done[name](x, 1)
        return r if isinstance(r, torch.Tensor) else r.values
    if name == "xor_sum":
        return torch.stack([torch.tensor(reduce(int.__xor__, row.tolist())) for row in x])
    if name in ("argmax", "argmin") and x.dtype == torch.bool:
        x = x.to(torch.uint8)
    function = {"max": torch.amax, "min": torch.amin}.get(name) or getattr(torch, name)
    return function(x, 1)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """All kernels, run in one process of the interpreter."""
    pytest.importorskip("triton")
    folder: Path = tmp_path_factory.mktemp("reductions")
    lines = ["import triton", "import triton.language as tl", "import opforge.generated.kernels.triton_prelude as tp"]
    for kind, name, dtype in KEYS:
        pad = {"sum": 0, "prod": 1, "xor_sum": 0, "any": 0, "all": 1, "logaddexp": 'float("-inf")'}.get(name)
        low, high = (
            ('float("-inf")', 'float("inf")')
            if dtype == "float32"
            else (-(2**63), 2**63 - 1)
            if dtype == "int64"
            else (0, 1)
        )
        pad = (high if "min" in name else low) if pad is None else pad
        lines += ["", "@triton.jit", f"def {kind}_{name}_{dtype}(a, o, n, BLOCK: tl.constexpr):"]
        lines += [
            "    row = tl.program_id(0)",
            "    at = tl.arange(0, BLOCK)",
            f"    x = tl.load(a + row * n + at, mask=at < n, other={pad})",
        ]
        if dtype == "bool":
            lines.append("    x = x != 0")
        if kind == "scan":
            lines.append(
                f"    tl.store(o + row * n + at, tl.associative_scan(x, 0, {TRITON_COMBINE[name]}), mask=at < n)"
            )
        else:
            lines.append(f"    tl.store(o + row, {TRITON_REDUCTIONS[name].format('x', 0, 'at')})")
    (folder / "reductions.py").write_text("\n".join(lines) + "\n")
    (folder / "runner.py").write_text(RUNNER)
    torch.save({f"{k}_{n}_{d}": values(d) for k, n, d in KEYS}, folder / "in.pt")
    path = os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(folder / "runner.py"), str(folder / "in.pt"), str(folder / "out.pt")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "out.pt")


@pytest.mark.parametrize(("kind", "name", "dtype"), KEYS)
def test_equals_torch(results: dict[str, torch.Tensor], kind: str, name: str, dtype: str) -> None:
    got, want = results[f"{kind}_{name}_{dtype}"], expected(kind, name, values(dtype))
    if dtype == "float32" and name in ("sum", "prod", "logaddexp"):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    else:
        floats = got.is_floating_point()
        assert torch.equal(got.nan_to_num(99.0) if floats else got, want.nan_to_num(99.0) if floats else want)
