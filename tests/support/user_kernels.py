"""Programs that launch Triton kernels of their own, on any device. Run as a script with TRITON_INTERPRET=1 it compares them with eager on the
processor and prints what it found as JSON: `python user_kernels.py [name ...]`.

Dynamo knows kernels by their class and asks whether Triton has a driver; here the class runs by the interpreter and the answer is yes.
"""

from __future__ import annotations

import json
import operator
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import opforge
from opforge.runtime import compile_fx
from opforge.runtime.dispatch.trace import trace

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TUNING: dict[str, Any] = {}
jit: Any = triton.jit

if INTERPRETED:
    import torch.utils._triton
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    torch.utils._triton.has_triton = lambda **_: True

    class Interpreted(JITFunction):
        """A kernel that Dynamo takes for one that a GPU runs."""

        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return InterpretedFunction(self.fn)[grid](*args, **kwargs)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return InterpretedFunction(self.fn)(*args, **kwargs)

    def _measure(call: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
        call()
        return [1.0 for _ in quantiles]

    jit, TUNING = Interpreted, {"do_bench": _measure}


# --- kernels


@jit
def _twice(x):  # type: ignore[no-untyped-def]
    return x * 2


@jit
def add(x, y, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n)
    tl.store(out + at, a + tl.load(y + at, mask=at < n), mask=at < n)


@jit
def double(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, _twice(tl.load(x + at, mask=at < n)), mask=at < n)


@jit
def double_rows(x, out, rows, columns, row, column, out_row, out_column, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i, j = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + i * row + j * column, mask=j < columns)
    tl.store(out + i * out_row + j * out_column, value * 2, mask=j < columns)


@jit
def sine_and_sum(x, out, total, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(out + at, tl.sin(value), mask=at < n)
    tl.atomic_add(total, tl.sum(value, 0))


@jit
def step(p, m, g, n, rate, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mean = tl.load(m + at, mask=at < n) * 0.5 + tl.load(g + at, mask=at < n)
    tl.store(m + at, mean, mask=at < n)
    tl.store(p + at, tl.load(p + at, mask=at < n) - mean * rate, mask=at < n)


@jit
def sine_gradient(x, g, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.cos(tl.load(x + at, mask=at < n)) * tl.load(g + at, mask=at < n), mask=at < n)


@jit
def sine(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.sin(tl.load(x + at, mask=at < n)), mask=at < n)


@jit
def tell(x, n):  # type: ignore[no-untyped-def]
    tl.device_print("told", tl.load(x))


@jit
def through(table, n):  # type: ignore[no-untyped-def]
    if n > 0:
        tl.store(tl.load(table).to(tl.pointer_type(tl.float32)), 1.0)


@triton.autotune(configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 64})], key=["n"], **TUNING)
@jit
def tuned(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


# --- programs


def _grid(n: Any) -> Any:
    return (triton.cdiv(n, 32),)


def new_tensor(x: Tensor, y: Tensor) -> Any:
    out = torch.empty_like(x)
    add[_grid(x.numel())](x.sin(), y, out, x.numel(), BLOCK=32)
    return out * 2


def grid_function(x: Tensor, y: Tensor) -> Any:
    out = torch.empty_like(x)
    n = x.numel()
    add[lambda meta: (triton.cdiv(n, meta["BLOCK"]), 1)](x, y * 3, out, n, BLOCK=64)
    return out.cos() + x


def in_place(x: Tensor, y: Tensor) -> Any:
    z = x * y
    double[_grid(z.numel())](z, z.numel(), BLOCK=32)
    return z + 1, z.sum()


def in_place_and_before(x: Tensor, y: Tensor) -> Any:
    z = x * y
    before = z.sin()
    double[_grid(z.numel())](z, z.numel(), BLOCK=32)
    double[_grid(z.numel())](z, z.numel(), BLOCK=32)
    return z, before


def copy_of_an_input(x: Tensor, y: Tensor) -> Any:
    z = x.clone()
    double[_grid(z.numel())](z, z.numel(), BLOCK=32)
    return z + x


def an_input(x: Tensor, y: Tensor) -> Any:
    double[_grid(x.numel())](x, x.numel(), BLOCK=32)
    return x.sin() + y


def an_input_twice(x: Tensor, y: Tensor) -> Any:
    old = x.cos()
    double[_grid(x.numel())](x, x.numel(), BLOCK=32)
    y.add_(1)
    double[_grid(x.numel())](x, x.numel(), BLOCK=32)
    return old


def a_view(x: Tensor, y: Tensor) -> Any:
    z = x + y
    double[_grid(z[1:].numel())](z[1:], z[1:].numel(), BLOCK=32)
    return z.sin()


def a_view_of_an_input(x: Tensor, y: Tensor) -> Any:
    v = x[1:3]
    double[_grid(v.numel())](v, v.numel(), BLOCK=32)
    return v + 1


def columns(x: Tensor, y: Tensor) -> Any:
    z = x * 1.5
    out = z[:, 1:4]
    given = y.t()[:3].t()
    double_rows[(x.shape[0],)](given, out, x.shape[0], 3, *given.stride(), *out.stride(), BLOCK=4)
    return z, out.sum()


def the_same_twice(x: Tensor, y: Tensor) -> Any:
    z = x * y
    add[_grid(z.numel())](z, z, z, z.numel(), BLOCK=32)
    return z.sin()


def halves(x: Tensor, y: Tensor) -> Any:
    z = torch.cat([x, y])
    first, second = z.chunk(2)
    add[_grid(first.numel())](first, y, second, first.numel(), BLOCK=32)
    return z * 2, first


def expanded(x: Tensor, y: Tensor) -> Any:
    given, out = y[0].expand(x.shape), torch.empty_like(x)
    double_rows[(x.shape[0],)](given, out, *x.shape, *given.stride(), *out.stride(), BLOCK=8)
    return out + x


def transposed(x: Tensor, y: Tensor) -> Any:
    given, out = (x * 2).t(), torch.empty_like(x)
    out = out.t()
    double_rows[(given.shape[0],)](given, out, *given.shape, *given.stride(), *out.stride(), BLOCK=16)
    return out + y.t()


def two_results(x: Tensor, y: Tensor) -> Any:
    out, total = torch.empty_like(x), x.new_zeros(())
    sine_and_sum[_grid(x.numel())](x, out, total, x.numel(), BLOCK=32)
    return out + y, total * 2


def optimizer(x: Tensor, y: Tensor) -> Any:
    g = torch.ones_like(x) * 0.1
    step[_grid(x.numel())](x, y, g, x.numel(), 0.1, BLOCK=32)
    step[_grid(x.numel())](x, y, g * 2, x.numel(), 0.2, BLOCK=32)


def autotuned(x: Tensor, y: Tensor) -> Any:
    out = torch.empty_like(x)
    tuned[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x * 2, out, x.numel())
    return out.sin()


def no_elements(x: Tensor, y: Tensor) -> Any:
    z, out = x[:0] * 2, torch.empty_like(x[:0])
    add[_grid(z.numel())](z, z, out, z.numel(), BLOCK=32)
    return out, x + y


def in_a_branch(x: Tensor, y: Tensor) -> Any:
    def positive(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        add[_grid(35)](x, y, out, 35, BLOCK=32)
        return out.sin()

    return torch.cond(x.sum() > 0, positive, lambda x, y: x * y, (x, y))


def under_autograd(x: Tensor, y: Tensor) -> Any:
    """Autograd sees nothing of a kernel."""
    total = y.detach().clone()
    double[_grid(total.numel())](total, total.numel(), BLOCK=32)
    return (x * total).sin() + y


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        sine[_grid(x.numel())](x, out, x.numel(), BLOCK=32)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        sine_gradient[_grid(x.numel())](x, g.contiguous(), out, x.numel(), BLOCK=32)
        return out


def a_function_with_gradient(x: Tensor, y: Tensor) -> Any:
    return Sine.apply(x * y) * y + 1


def a_checkpointed_function(x: Tensor, y: Tensor) -> Any:
    return checkpoint(lambda a, b: Sine.apply(a * b).exp() * b, x, y, use_reentrant=False)


def without_results(x: Tensor, y: Tensor) -> Any:
    tell[(1,)](y * 2, 1)
    z = x + y
    tell[(1,)](z, 1)
    return z.sin()


def with_gaps(x: Tensor, y: Tensor) -> Any:
    double[_grid(y.shape[0])](y, y.shape[0], BLOCK=32)
    return x + 1


def through_a_table(x: Tensor, y: Tensor) -> Any:
    table = torch.zeros(1, dtype=torch.int64, device=x.device)
    through[(1,)](table, 0)
    return x + 1


@dataclass(frozen=True)
class Program:
    """`grad`: gradients are compared; `copies`: of written memory, that the wrapper makes (None: any number); `sized`: also with symbolic sizes."""

    run: Callable[..., Any]
    grad: bool = False
    copies: int | None = None
    sized: bool = True


PROGRAMS: dict[str, Program] = {
    "new tensor": Program(new_tensor, copies=0),
    "grid function": Program(grid_function, copies=0),
    "in place": Program(in_place, copies=0),
    "in place, read before": Program(in_place_and_before, copies=0),
    "copy of an input": Program(copy_of_an_input, copies=1),
    "an input": Program(an_input, copies=0),
    "an input twice": Program(an_input_twice, copies=0),
    "a view": Program(a_view, copies=0),
    "a view of an input": Program(a_view_of_an_input),
    "columns": Program(columns, copies=0),
    "the same twice": Program(the_same_twice, copies=0),
    "halves": Program(halves, copies=0),
    "expanded": Program(expanded, copies=0),
    "transposed": Program(transposed, copies=0),
    "two results": Program(two_results, copies=0),
    "optimizer": Program(optimizer, copies=0),
    "autotuned": Program(autotuned, copies=0),
    "no elements": Program(no_elements),
    "in a branch": Program(in_a_branch, sized=False),
    "under autograd": Program(under_autograd, grad=True),
    "a function with gradient": Program(a_function_with_gradient, grad=True, copies=0),
    "a checkpointed function": Program(a_checkpointed_function, grad=True),
    "without results": Program(without_results, grad=True),
}


def inputs(rows: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [(torch.rand(rows, 7, generator=generator) + 0.1).to(DEVICE) for _ in range(2)]


def outcome(function: Callable[..., Any], given: Sequence[Tensor], grad: bool) -> tuple[Any, ...]:
    """Results, what is in the inputs afterwards, their versions, and gradients."""
    leaves = [t.clone().requires_grad_(grad) for t in given]
    with torch.set_grad_enabled(grad):
        out = pytree.tree_leaves(function(*leaves))
    grads = [*torch.autograd.grad(sum((t * t.detach().cos()).sum() for t in out), leaves)] if grad else []
    return [t.detach() for t in out if t is not None], [t.detach() for t in leaves], [t._version for t in leaves], grads


def compare(program: Program, dynamic: bool, **options: Any) -> str:
    """A program compiled and in eager; returns what differs."""
    torch._dynamo.reset()
    opforge.reset_stats()
    compiled = torch.compile(
        program.run, backend="opforge", fullgraph=True, dynamic=dynamic, options={"strict": True, **options}
    )
    for rows in (5, 9, 5) if dynamic else (5, 5):
        found, expected = (outcome(f, inputs(rows), program.grad) for f in (compiled, program.run))
        for what, ours, theirs in zip(("results", "inputs", "versions", "gradients"), found, expected, strict=True):
            try:
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            except AssertionError as error:
                return f"{what} of {rows} rows: {error}"
            if [t.stride() for t in ours if what == "results"] != [t.stride() for t in theirs if what == "results"]:
                return f"strides of {what} of {rows} rows"
    stats = opforge.stats()
    if stats["fallbacks"] or stats["graphs"] != 1:
        return f"{stats['graphs']} graphs, {stats['fallbacks']}"
    made = compile_fx.HISTORY[-1]
    copies = sum(a.wrapper.count(".copy_(") for a in (made, made.backward) if a is not None)
    if program.copies is not None and copies != program.copies and not dynamic:
        return f"{copies} copies:\n{made.wrapper}"
    return ""


def _eager(run: Callable[..., Any], given: Sequence[Tensor], reason: str) -> str:
    """A program that is left to eager, for a reason that it tells."""
    torch._dynamo.reset()
    opforge.reset_stats()
    copies = [torch.empty_strided(t.shape, t.stride(), device=t.device).copy_(t) for t in given]
    found, expected = torch.compile(run, backend="opforge", fullgraph=True)(*given), run(*copies)
    torch.testing.assert_close((found, given), (expected, copies))
    told = [*opforge.stats()["fallbacks"]]
    return "" if len(told) == 1 and reason in told[0] else f"{told}"


def _overlap() -> str:
    """Two inputs in one storage, of which one is written: the other sees it."""
    found = []
    for wrap in (lambda f: torch.compile(f, backend="opforge", fullgraph=True, options={"strict": True}), lambda f: f):
        torch._dynamo.reset()

        def run(a: Tensor, b: Tensor) -> Tensor:
            double[_grid(a.numel())](a, a.numel(), BLOCK=32)
            return b.sin()

        memory = torch.arange(40.0, device=DEVICE) / 10
        found.append((wrap(run)(memory[:20], memory[10:]), memory))
    torch.testing.assert_close(*found)
    return ""


def _functional() -> str:
    """The form of exported programs, which copies what the kernel writes; and the graph that is recorded runs in eager."""
    from torch._higher_order_ops import triton_kernel_wrap as form

    index, constants = (
        form.kernel_side_table.add_kernel(double),
        form.kernel_side_table.add_constant_args({"BLOCK": 32}),
    )
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    call = {"kernel_idx": index, "constant_args_idx": constants, "grid": [(2, 1, 1)], "tma_descriptor_metadata": {}}
    made = graph.call_function(
        form.triton_kernel_wrapper_functional, (), {**call, "kwargs": {"x": x, "n": 35}, "tensors_to_clone": ["x"]}
    )
    graph.output((graph.call_function(torch.sin, (graph.call_function(operator.getitem, (made, "x")),)), x))
    gm, (given, _) = torch.fx.GraphModule({}, graph), inputs()
    before = given.clone()
    with opforge.config.patch(strict=True):
        ours, same = opforge.compile_fx(gm, [given])(given)
    torch.testing.assert_close((ours, same, given), ((before * 2).sin(), before, before))
    traced = trace(gm, [given])
    torch.testing.assert_close(torch.fx.Interpreter(traced.graph).run(given)[0], (before * 2).sin())
    torch.testing.assert_close(given, before)
    return "" if "launch_double" in str(traced.graph.code) else str(traced.graph.code)


def _recorded_in_order() -> str:
    """Kernels that print run, in their order, also where nothing is made of it."""
    torch._dynamo.reset()
    compiled = torch.compile(without_results, backend="opforge", fullgraph=True, options={"strict": True})
    with torch.no_grad():
        compiled(*inputs())
    launches = [line for line in compile_fx.HISTORY[-1].wrapper.splitlines() if "run_tell" in line]
    return "" if len(launches) == 2 else f"{launches}"


OTHERS: dict[str, Callable[[], str]] = {
    "overlapping inputs": _overlap,
    "functional form": _functional,
    "kernels that print": _recorded_in_order,
    "an input with gaps": lambda: _eager(with_gaps, [inputs()[0], inputs()[1][:, ::2]], "writes to a tensor with gaps"),
    "an address from memory": lambda: _eager(
        through_a_table, inputs(), "writes to an address that none of its arguments is"
    ),
}


def main(names: Sequence[str]) -> None:
    found: dict[str, str] = {}
    for name, program in PROGRAMS.items():
        for dynamic in (False, True) if program.sized else (False,):
            key = f"{name}, symbolic" if dynamic else name
            if names and key not in names:
                continue
            try:
                found[key] = compare(program, dynamic)
            except Exception:  # noqa: BLE001 - the test tells it
                found[key] = traceback.format_exc()
    for name, look in OTHERS.items():
        if not names or name in names:
            try:
                found[name] = look()
            except Exception:  # noqa: BLE001
                found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
