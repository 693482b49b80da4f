"""Triton kernels against the reference interpreter (run by Triton's interpreter on the CPU), and compiled to cubins for sm_90 without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from opforge.runtime.ir.nodes import Buffer, contiguous_strides
from opforge.runtime.kernels.plan import Kernel
from opforge.runtime.lower.language import scalar_ops as s
from opforge.runtime.lower.language.builder import Builder
from opforge.runtime.lower.language.tensor import Tensor
from opforge.runtime.render.triton import render_kernel
from opforge.runtime.tile.legal import in_registers
from tests.support.ir_interpreter import interpret
from tests.support.loops import Ran, agree, cat, permute, plan_of, pointwise, program_of, reduce, softmax
from tests.support.plans import kernel
from tests.support.triton_run import compile_sm90, job_of, launch_interpreted, results
from tests.unit.render.test_cpp import (
    embedding,
    exp_sum_neg,
    gather,
    index_add,
    integers,
    layer_norm,
    max_pool,
    pad,
    rand,
)

Case = tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]


def nan_rows() -> torch.Tensor:
    x = rand(6, 40)
    x[2, 7] = x[2, 30] = float("nan")
    x[3] = float("-inf")
    return x


def infinite_rows() -> torch.Tensor:
    x = rand(5, 20000)
    x[0] = float("-inf")
    x[1, 7] = float("inf")
    x[2, :19000] = float("-inf")
    x[3, 19999] = float("nan")
    return x


def log_sum_exp(b: Builder, x: Tensor) -> Tensor:
    top = reduce(b, "max", x, 1, True)
    total = reduce(b, "sum", pointwise(b, lambda a, m: s.exp(s.sub(a, m)), x, top), 1, True)
    return pointwise(b, lambda t, m: s.add(s.log(t), m), total, top)


CASES: dict[str, Case] = {
    "broadcast": (lambda b, x, y: pointwise(b, s.add, x, y), lambda: [rand(7, 13), rand(13)]),
    "transcendental": (lambda b, x: pointwise(b, lambda a: s.mul(s.erf(a), s.tanh(a)), x), lambda: [rand(8, 33)]),
    "softmax rows": (lambda b, x: softmax(b, x, -1), lambda: [rand(11, 129)]),
    "softmax long rows": (lambda b, x: softmax(b, x, -1), lambda: [rand(2, 20000)]),
    "softmax long rows of infinities": (lambda b, x: softmax(b, x, -1), lambda: [infinite_rows()]),
    "log of sums of exponentials": (log_sum_exp, lambda: [100 * rand(3, 20000)]),
    "layer norm of long rows": (layer_norm, lambda: [1000 + rand(3, 20000)]),
    "softmax middle": (lambda b, x: softmax(b, x, 1), lambda: [rand(5, 33, 7)]),
    "layer norm": (layer_norm, lambda: [rand(11, 100)]),
    "sum of all": (lambda b, x: reduce(b, "sum", x, (0, 1)), lambda: [rand(50, 133)]),
    "sum of columns": (lambda b, x: reduce(b, "sum", x, 0), lambda: [rand(100, 33)]),
    "sum of first and last": (lambda b, x: reduce(b, "sum", x, (0, 2)), lambda: [rand(10, 13, 18)]),
    "integer sum": (lambda b, x: reduce(b, "sum", x, 1), lambda: [integers(9, 10, 13, low=-9, dtype=torch.int32)]),
    "argmax rows": (lambda b, x: reduce(b, "argmax", x, 1), lambda: [rand(10, 333)]),
    "argmax with nan": (lambda b, x: (reduce(b, "argmax", x, 1), reduce(b, "max", x, 1)), lambda: [nan_rows()]),
    "argmax ties": (lambda b, x: reduce(b, "argmax", x, 1), lambda: [integers(3, 10, 33).float()]),
    "argmin long columns": (lambda b, x: reduce(b, "argmin", x, 0), lambda: [integers(50, 5000, 3).float()]),
    "argmax of bytes": (lambda b, x: reduce(b, "argmax", x, 1), lambda: [integers(9, 10, 33, dtype=torch.uint8)]),
    "any": (lambda b, x: (reduce(b, "any", x, 1), reduce(b, "all", x, 0)), lambda: [rand(20, 33) > 1.5]),
    "any long": (lambda b, x: reduce(b, "any", x, 1), lambda: [rand(3, 20000) > 3]),
    "transpose and add": (
        lambda b, x, y: pointwise(b, s.add, permute(b, x, (1, 0)), y),
        lambda: [rand(20, 33), rand(33, 20)],
    ),
    "transpose and add, in tiles": (
        lambda b, x, y: pointwise(b, s.add, permute(b, x, (1, 0)), y),
        lambda: [rand(80, 130), rand(130, 80)],
    ),
    "transpose of the middle": (
        lambda b, x: pointwise(b, s.exp, permute(b, x, (0, 2, 1, 3))),
        lambda: [rand(3, 12, 20, 5).transpose(1, 3)],
    ),
    "concatenate": (lambda b, x, y: cat(b, [pointwise(b, s.exp, x), y, x], 1), lambda: [rand(7, 13), rand(7, 20)]),
    "bfloat16": (lambda b, x: softmax(b, x, 1), lambda: [rand(6, 41).bfloat16()]),
    "bfloat16 rounded at each step": (
        lambda b, x: pointwise(b, lambda a: s.mul(s.add(a, a), a), x, compute="same"),
        lambda: [rand(6, 41).bfloat16()],
    ),
    "float16": (lambda b, x: softmax(b, x, 1), lambda: [rand(6, 41).half()]),
    "float64": (lambda b, x: softmax(b, x, 1), lambda: [rand(6, 41).double()]),
    "mixed integers": (
        lambda b, x, y: pointwise(b, s.mul, x, y),
        lambda: [integers(9, 5, 17), integers(9, 5, 17, low=-9, dtype=torch.int32)],
    ),
    "floor division": (
        lambda b, x, y: pointwise(b, s.floordiv, x, y),
        lambda: [integers(9, 5, 17, low=-9), integers(9, 5, 17, low=1)],
    ),
    "comparison": (lambda b, x, y: pointwise(b, s.lt, x, y, promote="bool"), lambda: [rand(5, 17), rand(5, 17)]),
    "embedding": (embedding, lambda: [rand(50, 37), integers(50, 4, 9, low=-50)]),
    "gather": (gather, lambda: [rand(20, 37), integers(37, 20, 9)]),
    "cumulative rows": (lambda b, x: b.scan("sum", x.shape, 1, b.at(x, b.coords(x.shape))), lambda: [rand(5, 133)]),
    "cumulative columns": (lambda b, x: b.scan("sum", x.shape, 0, b.at(x, b.coords(x.shape))), lambda: [rand(50, 3)]),
    "cumulative maximum": (lambda b, x: b.scan("max", x.shape, 1, b.at(x, b.coords(x.shape))), lambda: [rand(5, 33)]),
    "cumulative long": (lambda b, x: b.scan("sum", x.shape, 0, b.at(x, b.coords(x.shape))), lambda: [integers(9, 20000, low=-9).float()]),
    "index add": (index_add, lambda: [rand(10, 33), integers(10, 70), rand(70, 33)]),
    "pad": (pad, lambda: [rand(10, 21)]),
    "pool": (max_pool, lambda: [rand(3, 10, 12)]),
    "three outputs": (exp_sum_neg, lambda: [rand(10, 21)]),
    "empty": (lambda b, x: pointwise(b, s.exp, x), lambda: [rand(0, 5)]),
    "sum of nothing": (lambda b, x: reduce(b, "sum", x, 0), lambda: [rand(0, 5)]),
    "no dimensions": (lambda b, x: pointwise(b, s.exp, x), lambda: [torch.tensor(2.0)]),
    "expanded input": (lambda b, x: pointwise(b, s.exp, x), lambda: [rand(8, 1).expand(8, 20)]),
    "input with an offset": (lambda b, x: softmax(b, x, 1), lambda: [rand(12, 30)[3:, 5:21]]),
    "channels last": (
        lambda b, x: softmax(b, x, 1),
        lambda: [rand(2, 8, 5, 7).to(memory_format=torch.channels_last)],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def ran() -> dict[str, Ran | str]:
    """Every case in one process of Triton's interpreter."""
    jobs, plans, found = [], [], {}
    for name, (build, make) in CASES.items():
        inputs = make()
        program = program_of(build, inputs)
        plan = plan_of(program)
        plans.append((name, program, plan, inputs))
        jobs.append(job_of(plan, inputs))
    for (name, program, plan, inputs), memory in zip(plans, launch_interpreted(jobs), strict=True):
        exact, eager = interpret(program, list(inputs), exact=True), interpret(program, list(inputs))
        found[name] = Ran(results(plan, memory), exact, eager, plan, "")
    return found


@pytest.mark.parametrize("name", CASES)
def test_interpreted(ran: dict[str, Ran], name: str) -> None:
    agree(ran[name])


COMPILED = [
    "broadcast",
    "softmax rows",
    "softmax long rows",
    "layer norm",
    "sum of columns",
    "argmax with nan",
    "pad",
    "gather",
    "bfloat16",
]
COMPILED += ["transpose and add, in tiles", "softmax long rows of infinities", "layer norm of long rows"]
COMPILED += ["transpose and add", "cumulative long", "index add", "any", "float16", "argmin long columns"]


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_sm90(name: str) -> None:
    build, make = CASES[name]
    plan = plan_of(program_of(build, make()))
    for k in plan.kernels():
        assert compile_sm90(k, plan.layouts)[:4] == b"\x7fELF"


# -- single kernels ----------------------------------------------------------------------------------------------------
def layouts(**shapes: tuple[str, tuple[Any, ...]]) -> dict[str, Buffer]:
    return {n: Buffer(n, shape, dtype, contiguous_strides(shape)) for n, (dtype, shape) in shapes.items()}


ROWS = {"x": "float32", "y": "float32"}


def rows(*phases: tuple[str, list[str]], outer: str = "o0<4", **more: Any) -> Kernel:
    return kernel("k", outer, phases, ROWS, **more)


def test_persistent_rows_are_read_once() -> None:
    phases = (
        ("r0<37", ["reduce m max x[o0, r0]"]),
        ("r1<37", ["reduce t sum exp(sub(x[o0, r1], m[]))"]),
        ("r2<37", ["store y[o0, r2] div(exp(sub(x[o0, r2], m[])), t[])"]),
    )
    source = render_kernel(rows(*phases), layouts(x=("float32", (4, 37)), y=("float32", (4, 37))))
    assert source.count("tl.load(") == 1
    assert source.count("tp.exp(") == 1
    assert "for " not in source


def test_long_rows_are_looped() -> None:
    phases = (("r0<20000", ["reduce m max x[o0, r0]"]), ("", ["store y[o0, 0] m[]"]))
    source = render_kernel(rows(*phases), layouts(x=("float32", (4, 20000)), y=("float32", (4, 1))))
    assert "for roffset in tl.range(0, 20000, RBLOCK, loop_unroll_factor=2):\n" in source
    assert 'm_acc = tl.full([XBLOCK, RBLOCK], float("-inf"), tl.float32)\n' in source


def test_tile_stays_in_registers() -> None:
    fill = ("r0<37", ["store t[r0] exp(x[o0, r0])", "reduce m sum exp(x[o0, r0])"])
    use = ("r1<37", ["store y[o0, r1] div(t[r1], m[])"])
    table = layouts(x=("float32", (4, 37)), y=("float32", (4, 37)))
    assert render_kernel(rows(fill, use, scratch="t: float32[37]"), table).count("tp.exp(") == 1
    flipped = rows(fill, ("r1<37", ["store y[o0, r1] div(t[36 - r1], m[])"]), scratch="t: float32[37]")
    assert render_kernel(flipped, table).count("tp.exp(") == 2


@pytest.mark.parametrize("between", [False, True])
def test_no_tile_is_computed_of_what_is_stored_over(between: bool) -> None:
    """In the memory of `x` the loop would have stored over elements that it reads later. So it is by way of another tile."""
    n = 20000
    fill = (f"r0<{n}", ["store t[r0] exp(x[o0, r0])", "reduce m sum exp(x[o0, r0])"])
    turn = (f"r1<{n}", [f"store u[r1] neg(t[{n - 1} - r1])"])
    use = (f"r2<{n}", [f"store y[o0, r2] div({'u[r2]' if between else f't[{n - 1} - r2]'}, m[])"])
    table = layouts(x=("float32", (4, n)), y=("float32", (4, n)))
    k = rows(fill, *([turn] if between else []), use, scratch=f"t: float32[{n}]; u: float32[{n}]")
    assert in_registers(k, table).no_alias == {("x", "y")}
    assert render_kernel(k, table).count("tp.exp(") == 2


def test_no_tile_stays_that_another_is_computed_of_elsewhere() -> None:
    """`u` is read turned, so it is computed again there, of `t` at the turned points, which no register holds."""
    fill = ("r0<37", ["store t[r0] exp(x[o0, r0])", "reduce m sum exp(x[o0, r0])"])
    more = ("r1<37", ["store u[r1] div(t[r1], m[])"])
    use = ("r2<37", ["reduce n sum mul(u[r2], u[36 - r2])"])
    k = rows(fill, more, use, ("", ["store y[o0, 0] n[]"]), scratch="t: float32[37]; u: float32[37]")
    source = render_kernel(k, layouts(x=("float32", (4, 37)), y=("float32", (4, 1))))
    assert source.count("tl.load(x + (o0 * 37 - r0_0 + 36)") == 1
    assert source.count("tp.exp(") == 2


def test_tile_is_computed_again() -> None:
    """In a looped kernel, and where the tile is read in another order (but then not where a store may be in place)."""
    long = layouts(x=("float32", (4, 20000)), y=("float32", (4, 20000)), z=("float32", (4,)))
    fill, use = ("r0<20000", ["store t[r0] exp(x[o0, r0])"]), ("r1<20000", ["store y[o0, r1] neg(t[r1])"])
    source = render_kernel(rows(fill, use, scratch="t: float32[20000]"), long)
    assert source.count("tp.exp(") == 1
    assert source.count("for roffset") == 1
    flipped = ("r1<20000", ["reduce m sum mul(t[r1], t[19999 - r1])"])
    source = render_kernel(
        kernel(
            "k",
            "o0<4",
            [fill, flipped, ("", ["store z[o0] m[]"])],
            {**ROWS, "z": "float32"},
            scratch="t: float32[20000]",
        ),
        long,
    )
    assert source.count("tp.exp(") == 2


def test_64_bit_coordinates_only_where_needed() -> None:
    body = ("", ["store y[o0] exp(x[o0])"])
    small = render_kernel(rows(body, outer="o0<1000"), layouts(x=("float32", (1000,)), y=("float32", (1000,))))
    large = render_kernel(
        rows(body, outer="o0<3000000000"), layouts(x=("float32", (3000000000,)), y=("float32", (3000000000,)))
    )
    assert "int64" not in small
    assert "xindex = tl.program_id(0).to(tl.int64) * XBLOCK" in large
