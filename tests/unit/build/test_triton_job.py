"""Binaries do what the source says: index computations of 16 bits, and products that are rounded before they are added."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from opforge.runtime.build.ptx import with_halves_added_apart
from opforge.runtime.build.triton_job import Job, compile_job

triton = pytest.importorskip("triton")

HEAD = """\
import triton
import triton.language as tl


@triton.jit
def k(x, rows, out, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
"""
OF_ROWS = """\
    r = tl.arange(0, RBLOCK)[None, :]
    mask = r < 216
    at = r // 72 * 18 + (r // 24) % 3 * 6 + (r // 4) % 6
    v = tl.load(x + r, mask, other=0) - tl.load(rows + at, mask, other=0)
    tl.store(out + tl.arange(0, XBLOCK), tl.sum(tl.where(mask, v * v, 0.0), 1))
"""
OF_PRODUCTS = """\
    r = tl.arange(0, RBLOCK)
    v = tl.load(x + r) * 15.0
    tl.store(out + r, v - tl.load(rows + r))
"""


def instructions(body: str, folder: Path) -> str:
    """The device's own instructions of a kernel of `x`, `rows` and `out`, for one warp."""
    job = Job("k", HEAD + body, ("fp32",) * 3, 0, 1, 256, 1, 90)
    cubin = folder / "k.cubin"
    cubin.write_bytes(compile_job(job, folder).cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_halves_of_a_number_are_added_one_by_one() -> None:
    line = "\tadd.s16x2 \t%r282, %r280, %r281;"
    text = with_halves_added_apart(f"\tmov.b32 \t%r281, 36;\n{line}\n\tadd.s32 \t%r1, %r2, %r3;")
    assert "16x2" not in text
    assert "mov.b32 {%low1, %high1}, %r280; mov.b32 {%low2, %high2}, %r281;" in text
    assert "mov.b32 %r282, {%low0, %high0}; }" in text
    assert "\tadd.s32 \t%r1, %r2, %r3;" in text


def test_no_addition_of_halves_is_assembled(tmp_path: Path) -> None:
    """`VIADD.16x2 R29, R22, 0x0` stood for an addition of 36: the third block of rows was read as the first."""
    assert "16x2" not in instructions(OF_ROWS, tmp_path)


def test_products_are_rounded_before_they_are_added(tmp_path: Path) -> None:
    text = instructions(OF_PRODUCTS, tmp_path)
    assert "FMUL" in text
    assert "FADD" in text
    assert "FFMA" not in text
