"""Philox in Triton, a block for its four neighbours: the bits that each element has by itself, and nothing through shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from opforge.runtime.build.triton_job import compile_job
from opforge.runtime.ir.index import Expr, Var, of, sym, var
from opforge.runtime.ir.nodes import Buffer, Nest, Node, Output, Program, const, contiguous_strides, index_node, load
from opforge.runtime.render.triton import render_kernel
from opforge.runtime.render.triton_unit import render_triton
from opforge.runtime.targets.cuda import job_of as compiler_job
from opforge.runtime.tile.runs import runs
from tests.support.ir_interpreter import interpret
from tests.support.loops import plan_of
from tests.support.triton_run import job_of, launch_interpreted, results

SEED = torch.tensor([-1234567890123456789])
POINT, ROW, COLUMN = "tp.philox(", "tp.philox_row(v", "tl.trans(tp.philox_row("


@dataclass(frozen=True)
class Case:
    """A buffer of random words, or their sums over the last or first dimension, and how its kernel computes them.

    index  of the word, by the coordinates.
    form   the spelling in the kernel, and `each` the neighbours that a thread holds.
    """

    shape: tuple[int, ...]
    index: Callable[..., Expr]
    form: str = ROW
    dtype: str = "int32"
    each: int = 4
    over: int | None = None


def linear(*shape: int, offset: int = 0) -> Callable[..., Expr]:
    def index(*i: Expr) -> Expr:
        total = i[0] * 0 + offset
        for e, s in zip(i, contiguous_strides(shape), strict=True):
            total = total + e * s
        return total

    return index


CASES = {
    "flat": Case((256,), linear(256)),
    "flat with a tail": Case((999,), linear(999)),
    "flat in 16 bits": Case((999,), linear(999), dtype="int16", each=8),
    "flat in 8 bits": Case((999,), linear(999), dtype="int8", each=16),
    "few": Case((7,), linear(7)),
    "two": Case((2,), linear(2)),
    "from a multiple of four": Case((999,), linear(999, offset=2**35 + 8)),
    "not from a multiple of four": Case((999,), linear(999, offset=2), POINT),
    "strided": Case((500,), lambda i: i * 4, POINT),
    "of odd rows": Case((9, 33), linear(9, 33)),
    "of a part of even rows": Case((9, 36), linear(9, 64, offset=64), dtype="int16", each=8),
    "of a part of odd rows": Case((9, 32), linear(9, 63), POINT),
    "one row for all": Case((9, 36), lambda i, j: j, dtype="int8", each=16),
    "transposed": Case((37, 20), lambda i, j: j * 37 + i, POINT),
    "sums of rows": Case((9, 132), linear(9, 132), over=1),
    "sums of odd rows": Case((9, 133), linear(9, 133), POINT, over=1),
    "sums of short rows": Case((50, 4), linear(50, 4), over=1),
    "sums of two dimensions": Case((9, 5, 12), linear(9, 5, 12), over=1),
    "sums of long rows": Case((3, 20000), linear(3, 20000), over=1),
    "sums of long odd rows": Case((3, 20001), linear(3, 20001), POINT, over=1),
    "sums of columns": Case((133, 20), linear(133, 20), COLUMN, over=0),
    "sums of odd columns": Case((133, 19), linear(133, 19), POINT, over=0),
}  # fmt: skip


def program_of(case: Case) -> Program:
    i = [var(f"i{k}", n) for k, n in enumerate(case.shape)]
    word = Node("philox", (load("seed", (0,), "int64"), const(3, "int64"), index_node(case.index(*i))), "int32")
    if case.dtype != "int32":
        word = Node("to_dtype", (word & const(127, "int32"),), case.dtype)
    seed = Buffer("seed", (1,), "int64", (1,))
    if case.over is None:
        nest = Nest("y", case.shape, case.dtype, tuple(i), word)
        return Program((seed,), [nest], (Output("y", contiguous_strides(case.shape)),))
    # With a buffer that is read, so that columns are known to be neighbours in memory.
    x = Buffer("x", case.shape, "int64", contiguous_strides(case.shape))
    body = Node("to_dtype", (word,), "int64") + load("x", tuple(i), "int64")
    outer, inner = (i[:1], i[1:]) if case.over == 1 else (i[1:], i[:1])
    shape = tuple(int(e.var.extent) for e in outer)
    nest = Nest("y", shape, "int64", tuple(outer), body, rvars=tuple(e.var for e in inner), reduce="sum")
    return Program((seed, x), [nest], (Output("y", contiguous_strides(shape)),))


def inputs_of(case: Case) -> list[torch.Tensor]:
    return [SEED] if case.over is None else [SEED, torch.ones(case.shape, dtype=torch.int64)]


@pytest.fixture(scope="module")
def ran() -> dict[str, tuple[torch.Tensor, torch.Tensor, str]]:
    """By case: what Triton's interpreter got, what is right, and the kernel."""
    found, jobs = [], []
    for name, case in CASES.items():
        program = program_of(case)
        plan = plan_of(program)
        (kernel,) = plan.kernels()
        jobs.append(job_of(plan, inputs_of(case)))
        found.append((name, plan, interpret(program, inputs_of(case)), render_kernel(kernel, plan.layouts)))
    return {
        name: (results(plan, memory)[0], right[0], text)
        for (name, plan, right, text), memory in zip(found, launch_interpreted(jobs), strict=True)
    }


@pytest.mark.parametrize("name", CASES)
def test_same_bits(ran: dict[str, tuple[torch.Tensor, torch.Tensor, str]], name: str) -> None:
    got, right, text = ran[name]
    form = CASES[name].form
    assert form in text
    assert sum(text.count(f) for f in ("tp.philox(", "tp.philox_row(")) == 1
    if form != POINT:
        assert f", {CASES[name].each})" in text
    assert torch.equal(got, right)


def test_one_element_for_all_points_is_one_load(ran: dict[str, tuple[torch.Tensor, torch.Tensor, str]]) -> None:
    assert "v0 = tl.broadcast_to(tl.load(seed + (0)), [1])" in ran["flat"][2]
    assert "tl.broadcast_to(tl.load(seed + (0)), [1, 1])" in ran["sums of rows"][2]


def test_runs() -> None:
    a, b, n = Var("a", 6), Var("b", 8), sym("n")
    odd, long = Var("c", 7), Var("d", n)
    i, j, k, m = map(of, (a, b, odd, long))
    assert runs(j, (b,))
    assert runs(j + 4, (b,))
    assert runs(i * 8 + j, (a, b))
    assert runs(i * 12 + j, (a, b))
    assert runs(j + n * 4, (b,))
    assert not runs(j + n, (b,))
    assert not runs(j + 2, (b,))
    assert not runs(j * 2, (b,))
    assert not runs(i * 3 + j, (a, b))
    assert not runs((i * 8 + j) // 2, (a, b))
    assert runs(k, (odd,))
    assert runs(i * 7 + k, (a, odd))
    assert runs(i * 7 + k + 4, (a, odd))
    assert not runs(i * 8 + k, (a, odd))
    assert not runs(i * 7 + k, (odd,))
    assert runs(m, (long,))
    assert runs(i * n + m, (a, long))
    assert not runs(i * n + m, (long,))
    assert not runs(i, ())


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
def test_no_word_goes_through_shared_memory(dtype: str, tmp_path: Path) -> None:
    n = 1 << 20
    i = var("i0", n)
    word = Node("philox", (load("seed", (0,), "int64"), const(3, "int64"), index_node(i)), "int32")
    body = load("x", (i,), dtype) + Node("to_dtype", (word & const(15, "int32"),), dtype)
    buffers = (Buffer("seed", (1,), "int64", (1,)), Buffer("x", (n,), dtype, (1,)))
    plan = plan_of(Program(buffers, [Nest("y", (n,), dtype, (i,), body)], (Output("y", (1,)),)))
    (kernel,) = render_triton(plan).kernels.values()
    assert ROW in kernel.source
    assert compile_job(compiler_job(kernel, 90), tmp_path).meta["shared"] == 0
