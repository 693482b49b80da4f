"""Long rows, concatenations and approximations: what the source of a kernel says, and its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from opforge.runtime.ir.index import Var, of, recombine
from opforge.runtime.render.triton_unit import blocks, render_triton
from opforge.runtime.tile.launch import Launch, launch
from tests.support.triton_run import job_of, launch_interpreted, results

from .test_triton_programs import planned, residual_layer_norm


def half(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def first(fn: Callable[..., Any], *inputs: Tensor) -> tuple[Launch, str]:
    """How the first kernel is launched, and its source."""
    plan = planned(fn, list(inputs))
    kernel = plan.kernels()[0]
    return launch(kernel, plan.layouts), render_triton(plan).kernels[kernel.name].source


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, True) + 1e-6) * w


def test_rows_of_one_buffer_stay_in_registers() -> None:
    """Which up to 32768 elements of 32 bits do for 1024 threads of 64 registers."""
    x, y = torch.empty(270, 32768), torch.empty(270, 32768)
    assert first(lambda x: x.softmax(-1), x)[0].persistent
    assert first(rms_norm, x, y[0])[0].persistent  # the weights are read when they are needed
    assert not first(lambda x: x.softmax(-1), torch.empty(270, 32769))[0].persistent
    assert not first(lambda x: x.softmax(-1), x.double())[0].persistent
    assert not first(lambda x, y: (x + y).softmax(-1), x, y)[0].persistent
    assert not first(lambda x: x.argmax(-1), x)[0].persistent  # it meets them once


def test_what_is_read_again_stays_in_the_cache() -> None:
    _, text = first(lambda x: F.log_softmax(x, -1), torch.empty(270, 50304))
    loads = [line for line in text.splitlines() if "tl.load(" in line]
    assert ["evict_last" in line for line in loads] == [True, False]
    (store,) = (line for line in text.splitlines() if "tl.store(" in line)
    assert 'eviction_policy="evict_first"' in store


def test_one_element_for_a_tile() -> None:
    """The weights of a group norm, in the loops over channels and places: one for each tile that lies in a channel."""
    norm: Callable[..., Any] = lambda x, w, b: F.group_norm(x, 2, w, b)  # noqa: E731
    shape, text = first(norm, torch.empty(135, 8, 128, 128), torch.randn(8), torch.randn(8))
    assert (shape.persistent, shape.even, shape.rows) == (False, 16384, 1)
    assert text.count("if 16384 % RBLOCK == 0 else (tl.load(") == 2
    assert "+ rindex1, xmask" not in text
    assert "+ rindex1), xmask" in text  # all loops in the order of memory are one index
    assert blocks(shape) == (1, 4096, 32)
    shape, _ = first(norm, torch.empty(135, 20, 64, 64, dtype=torch.bfloat16), half(20), half(20))
    assert shape.even == 4096
    assert blocks(shape) == (1, 4096, 32)


def test_what_a_program_stored_it_has() -> None:
    """A residual layer norm read its sums back from memory, behind a barrier for each of its passes."""
    _, text = first(residual_layer_norm, half(40, 96), half(40, 96), half(96), half(96))
    assert "debug_barrier" not in text
    assert text.count("tl.load(") == 4


def test_loops_that_only_reduce_are_unrolled() -> None:
    assert "loop_unroll_factor=2" in first(lambda x: x.argmax(-1), torch.randn(3, 40000))[1]
    assert "loop_unroll_factor" not in first(lambda x: x.softmax(-1), torch.empty(270, 40000))[1]


def test_branches_where_blocks_lie_in_one_piece() -> None:
    def cat(*parts: Tensor) -> Tensor:
        return torch.cat([p * (k + 2) for k, p in enumerate(parts)], 1)

    _, text = first(cat, torch.randn(3, 512), torch.randn(3, 1024))
    assert "if first < 512:" in text
    assert "tl.where(" not in text
    assert "if first" not in first(cat, torch.randn(3, 512), torch.randn(3, 500))[1]
    assert "if first" not in first(cat, half(3, 512), half(3, 1024))[1]  # blocks of 1024
    assert "if first < 1024:" in first(cat, half(3, 1024), half(3, 1024))[1]
    _, text = first(lambda a, b: torch.cat([F.silu(a), b], 1), half(3, 1024), half(3, 1024))
    assert "if first < 1024:" in text
    assert "tp.coarse_" in text


def test_approximations_beside_one() -> None:
    assert "tp.coarse_erf(" in first(F.gelu, half(30, 40))[1]
    assert "tp.coarse_tanh(" in first(lambda x: F.gelu(x, approximate="tanh"), half(30, 40))[1]
    assert "tp.coarse_" not in first(F.gelu, torch.randn(30, 40))[1]
    for fn in (torch.tanh, torch.erf, lambda x: x.float().erf().mul(3).bfloat16()):
        assert "tp.coarse_" not in first(fn, half(30, 40))[1]  # what is small has digits of its own


def test_places_beyond_32_bits() -> None:
    """The step along a column was multiplied by its stride in 32 bits."""
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(100000, 30000)
    _, text = first(lambda x: x.argmax(0), x)
    assert "rindex0 = (roffset + tl.arange(0, RBLOCK)[None, :]).to(tl.int64)" in text


def test_digits_of_several_loops() -> None:
    """(x // k) // n is held as x // (k * n), and recombined all the same."""
    x = of(Var("x", 65536))
    assert recombine((x // 128 % 128) * 128 + x % 128 + x // 16384 * 16384) is x


def test_sums_of_exponentials_that_are_needed_are_exact() -> None:
    """One that is returned, or is of both signs, has float32's digits."""

    def returned(x: Tensor) -> tuple[Tensor, Tensor]:
        e = (x.float() - x.float().amax(-1, keepdim=True)).exp()
        total = e.sum(-1, keepdim=True)
        return (e / total).bfloat16(), total

    def signed(x: Tensor) -> Tensor:
        e = x.float().exp() * x.float()
        return (e / e.sum(-1, keepdim=True)).bfloat16()

    x = half(270, 40)
    assert "tp.coarse_exp(" not in first(returned, x)[1]
    assert "tp.coarse_exp(" not in first(signed, x)[1]
    assert "tp.coarse_exp(" in first(lambda x: x.softmax(-1), x)[1]


def test_approximations_at_the_ends_of_the_range() -> None:
    """Quotients of rows by values from the least number to infinity, and what is added to one: rounded to bfloat16, beside a float64 run. (The
    interpreter makes zeros of bfloat16's numbers below the least normal one.)
    """
    powers = torch.tensor([*(2.0**k for k in range(-149, 128, 3)), 0.0, float("inf"), float("nan")])
    rows = torch.cat([powers, -powers * 1.37])

    def divided(x: Tensor, y: Tensor) -> Tensor:
        return (x / y).bfloat16()

    def beside_one(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.gelu(x), F.gelu(x, approximate="tanh")

    x = rows.expand(len(rows), -1).contiguous()
    cases = [(divided, [x, rows[:, None].contiguous()]), (beside_one, [x.clamp(-1e30, 1e30).bfloat16()])]
    plans = [planned(fn, inputs) for fn, inputs in cases]
    assert all("tp.coarse_" in render_triton(plan).source for plan in plans)
    memories = launch_interpreted([job_of(p, i) for p, (_, i) in zip(plans, cases, strict=True)])
    for (fn, inputs), plan, memory in zip(cases, plans, memories, strict=True):
        wants = fn(*(t.double() for t in inputs))
        for got, want in zip(results(plan, memory), wants if isinstance(wants, tuple) else (wants,), strict=True):
            torch.testing.assert_close(got, want.bfloat16(), rtol=2.0**-8, atol=2.0**-126, equal_nan=True)


def test_quotients_by_powers_of_two_are_products() -> None:
    """Which round the same number; other divisors, and those whose reciprocal has no exact place, are divided by."""
    _, text = first(lambda x: x / 4096 + x / 3, torch.randn(300, 40))
    assert text.count("tp.div(") == 1
    _, text = first(lambda x: x / 2.0**120, torch.randn(300, 40))
    assert text.count("tp.div(") == 1
    _, text = first(lambda x: x.mean(-1), torch.randn(300, 64))
    assert "tp.div(" not in text
