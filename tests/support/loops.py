"""Programs written straight in the lowering's own terms, compiled and run: tests of scheduling and code generation use these."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from opforge.generated.scalars import SCALARS
from opforge.runtime import config
from opforge.runtime.build.compiler import compile_cpp
from opforge.runtime.check.plan import check
from opforge.runtime.execute.load import load_library, load_wrapper
from opforge.runtime.host.from_plan import host_program
from opforge.runtime.host.python import python_source
from opforge.runtime.ir.nodes import Buffer, Output, Program, contiguous_strides, index_node
from opforge.runtime.ir.verify import verify
from opforge.runtime.kernels.plan import Plan
from opforge.runtime.kernels.statements import kernel_checks
from opforge.runtime.lower.language import names
from opforge.runtime.lower.language import scalar_ops as s
from opforge.runtime.lower.language.builder import Builder
from opforge.runtime.lower.language.tensor import Tensor
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.render.cpp_unit import PRELUDE, render_unit
from opforge.runtime.schedule.draft import Options
from opforge.runtime.schedule.pipeline import schedule
from tests.support.ir_interpreter import interpret

from .machines import AVX2, H200, launched_on


@dataclass
class Ran:
    """What running a program gave, what it should have given (float64), and the plan."""

    got: Sequence[torch.Tensor]
    exact: Sequence[torch.Tensor]
    eager: Sequence[torch.Tensor]
    plan: Plan
    source: str


def program_of(build: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Program:
    """The functional program that `build(builder, *tensors)` defines."""
    b = Builder({}, {})
    buffers, tensors = [], []
    for k, t in enumerate(inputs):
        buffer = Buffer(b.fresh(f"in{k}"), tuple(t.shape), str(t.dtype).removeprefix("torch."), tuple(t.stride()))
        buffers.append(buffer)
        tensors.append(Tensor(buffer.name, buffer.shape, buffer.dtype, b))
    outs = build(b, *tensors)
    outs = outs if isinstance(outs, tuple) else (outs,)
    return separate_outputs(
        Program(tuple(buffers), b.items, tuple(Output(o.name, contiguous_strides(o.shape)) for o in outs))
    )


def plan_of(program: Program, fusion: bool = True) -> Plan:
    """Verified, scheduled, and the plan checked."""
    verify(program)
    plan = schedule(program, Options(costs=lambda op: SCALARS[op].cost if op in SCALARS else 1, fusion=fusion))
    check(program, plan)
    return launched_on(plan, H200)


def run(
    build: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    *,
    lanes: int = 8,
    threshold: int = 1000,
    fusion: bool = True,
) -> Ran:
    """Compile for `lanes` and run."""
    program = program_of(build, inputs)
    plan = plan_of(program, fusion)
    unit = render_unit(plan, replace(AVX2, lanes=lanes), threads=2, threshold=threshold)
    source = unit.source.replace(
        '#include "prelude.h"\n', f"#define OPFORGE_LANES {lanes}\n" * (lanes != 1) + PRELUDE.read_text(), 1
    )
    module = load_wrapper(python_source(host_program(plan, [b.name for b in program.inputs], {})), "loops")
    if unit.symbols:
        library = load_library(compile_cpp(source, name="loops", cfg=config.current()))
        for kernel in plan.kernels():
            function = library[unit.symbols[kernel.name]]
            function.argtypes = [ctypes.c_void_p] * unit.arity[kernel.name]
            function.restype = ctypes.c_int if kernel_checks(kernel) else None
            setattr(module, kernel.name, function)
    return Ran(
        module.call(*inputs),
        interpret(program, list(inputs), exact=True),
        interpret(program, list(inputs)),
        plan,
        unit.source,
    )


def agree(ran: Ran) -> None:
    """Every output within twice the reference interpreter's own error against float64 (at least one rounding of the largest value)."""
    for got, exact, eager in zip(ran.got, ran.exact, ran.eager, strict=True):
        assert got.dtype == eager.dtype
        assert got.shape == eager.shape
        if not got.is_floating_point():
            assert torch.equal(got, eager)
            continue
        assert torch.equal(got.isnan(), eager.isnan())
        keep = exact.isfinite()
        error = (got.double() - exact)[keep].abs()
        allowed = 2 * (eager.double() - exact)[keep].abs().max() if keep.any() else 0
        floor = torch.finfo(got.dtype).eps * exact[keep].abs().max() if keep.any() else 0
        assert keep.sum() == 0 or error.max() <= allowed + floor, (error.max(), allowed, floor)
        assert torch.equal(got[~keep], eager[~keep]) or bool(eager[~keep].isnan().any())


def pointwise(b: Builder, f: Callable[..., Any], *ts: Any, **kw: Any) -> Tensor:
    p = b.pointwise(ts, **kw)
    return p.result(f(*p.operands))


def reduce(b: Builder, kind: str, t: Tensor, dims: int | Sequence[int], keep: bool = False) -> Tensor:
    d = [x % len(t.shape) for x in ([dims] if isinstance(dims, int) else dims)]
    shape = names.reduced(t.shape, d, keep)
    i, r = b.coords(shape), b.rcoords([t.shape[x] for x in d])
    return b.reduce(kind, shape, r, b.at(t, names.unreduced(i, r, d, keep)))


def view(b: Builder, t: Tensor, shape: Sequence[int]) -> Tensor:
    i = b.coords(shape)
    return b.define(shape, b.at(t, names.reshaped(i, shape, t.shape)))


def permute(b: Builder, t: Tensor, dims: Sequence[int]) -> Tensor:
    shape = [t.shape[d] for d in dims]
    i = b.coords(shape)
    index: list[Any] = [None] * len(dims)
    for k, d in enumerate(dims):
        index[d] = i[k]
    return b.define(shape, b.at(t, index))


def softmax(b: Builder, x: Tensor, dim: int) -> Tensor:
    e = pointwise(b, lambda a, m: s.exp(s.sub(a, m)), x, reduce(b, "max", x, dim, True))
    return pointwise(b, s.div, e, reduce(b, "sum", e, dim, True))


def cat(b: Builder, ts: Sequence[Tensor], dim: int) -> Tensor:
    shape = list(ts[0].shape)
    shape[dim] = sum(t.shape[dim] for t in ts)  # type: ignore[misc]
    i = b.coords(shape)
    value: Any = 0.0
    at = shape[dim]
    for t in reversed(ts):
        at = at - t.shape[dim]
        index: list[Any] = list(i)
        index[dim] = i[dim] - at
        inside = s.logical_and(s.ge(index_node(i[dim]), at), s.lt(index_node(i[dim]), at + t.shape[dim]))
        value = b.guarded(inside, b.at(t, index), value)
    return b.define(shape, value, ts[0].dtype)
