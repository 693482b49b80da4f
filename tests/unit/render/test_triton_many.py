"""What a GPU counts and rounds by itself: loops of more steps than 32 bits count, zeros with a sign, numbers below the least normal one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from opforge.runtime.build.triton_job import compile_job
from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.targets import cuda

from .test_triton_programs import planned


def sources(fn: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """Of all kernels, on a GPU."""
    plan = planned(fn, list(inputs))
    unit = render_triton(plan)
    return [unit.kernels[k.name].source for k in plan.kernels()]


@pytest.mark.parametrize("steps", [2**31, 2**31 + 5, 2**33])
def test_loops_of_many_steps_count_in_64_bits(steps: int) -> None:
    """An unsigned bound of 32 bits, which Triton makes of such a number, ends the loop before its first step."""
    found = sources(lambda x: x.argmax(), torch.zeros(1, dtype=torch.int8).expand(steps))
    assert f"range(0, tl.full([], {steps}, tl.int64), RBLOCK" in found[0]
    assert "rindex0 = (roffset + tl.arange(0, RBLOCK)[None, :]).to(tl.int64)" in found[0]


def test_a_few_less_count_in_32_bits() -> None:
    (found,) = sources(lambda x: x.argmax(), torch.zeros(1, dtype=torch.int8).expand(2**31 - 1))
    assert "range(0, 2147483647, RBLOCK" in found


def test_a_zero_keeps_its_sign() -> None:
    """`tl.full` gives 0.0 for -0.0."""
    (found,) = sources(lambda x: torch.where(x > 0, x, -0.0), torch.randn(40))
    assert "tl.full([1], 0.0, tl.float32) * -1.0" in found
    assert "-0.0" not in found


@pytest.mark.parametrize("name", ["div", "floor", "exp", "log", "sin", "sqrt"])
def test_small_numbers_are_not_zeros(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No instruction takes numbers below the least normal one for 0."""
    import triton

    functions: dict[str, Callable[[Tensor], Tensor]] = {"div": lambda x: x / x.abs()}
    made: list[Any] = []
    compiled = triton.compile
    monkeypatch.setattr(triton, "compile", lambda *args, **kwargs: made.append(compiled(*args, **kwargs)) or made[-1])
    for kernel in render_triton(
        planned(functions.get(name, getattr(torch, name, None)), [torch.rand(40)])
    ).kernels.values():
        compile_job(cuda.job_of(kernel, 90), tmp_path)
    (kernel,) = made
    assert ".entry" in kernel.asm["ptx"]
    # The exponential's own argument is scaled, so that no power of two is that small.
    assert ".ftz" not in kernel.asm["ptx"].replace("ex2.approx.ftz", "")
