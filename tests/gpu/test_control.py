"""Conditions, loops and scans on a CUDA device, forward and backward, judged by a float64 run; and what recording does with them. `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import opforge
from opforge.errors import UnsupportedError
from opforge.runtime import compile_fx
from opforge.tests.support.judged import judge

pytestmark = pytest.mark.gpu
Program = Callable[..., Any]
SIZE = (65, 70)


def _compiled(program: Program, **options: Any) -> Program:
    torch._dynamo.reset()
    opforge.reset_stats()
    return torch.compile(program, backend="opforge", fullgraph=True, options={"strict": True, **options})


def _rand(*size: int, sign: int = 1) -> Tensor:
    """Numbers of one sign, so that predicates do not depend on rounding."""
    return sign * (torch.rand(size, device="cuda") + 0.1)


# --- programs; predicates are sums of numbers of one sign


def _branches(x: Tensor, y: Tensor) -> Any:
    def positive(x: Tensor, y: Tensor) -> Any:
        return (x @ y.t()).relu(), (x * y).sum(0)

    def negative(x: Tensor, y: Tensor) -> Any:
        return (x * 2) @ y.t(), x.sin().sum(0)

    a, b = torch.cond(x.sum() > 0, positive, negative, (x, y))
    return a * 2, b + 1


def _closure(x: Tensor, y: Tensor) -> Any:
    h = x @ y.t()
    return torch.cond(h.sum() > 0, lambda a: (a * h).sum(), lambda a: a.sum() * y.sum(), (x.sum(1),))


def _strided_operand(x: Tensor, y: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda a: a.softmax(-1), lambda a: a.cos(), (x[:, ::2],))


def _expanded_operand(x: Tensor, y: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a.cos(), (x[0].expand(4, x.shape[1]),))


def _transposed(x: Tensor, y: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x.t() + 1, lambda x: x.t().cos(), (x,))


def _nested(x: Tensor, y: Tensor) -> Any:
    def large(x: Tensor) -> Tensor:
        return torch.cond(x.abs().sum() > 1, lambda x: x.sin() * 2, lambda x: x * x, (x,))

    return torch.cond(x.sum() > 0, large, lambda x: large(x - 1), (x,))


def _rows(x: Tensor, y: Tensor) -> Any:
    return scan(lambda c, row: (c * 0.9 + row, c.sin()), y[0].clone(), x)


def _columns_reversed(x: Tensor, y: Tensor) -> Any:
    return scan(lambda c, row: (c * 0.9 + row, c.sin()), y[:, 0].clone(), x, dim=1, reverse=True)


def _cells(x: Tensor, y: Tensor) -> Any:
    weight = y.t() @ y * 0.01

    def step(c: Any, rows: Any) -> Any:
        return {"a": (c["a"] + rows[0] @ weight).tanh(), "n": c["n"] + 1}, (c["a"].sin(), rows[1] + c["n"])

    return scan(step, {"a": y[0].clone(), "n": y.new_tensor(2.0)}, (x, y))


def _branch_in_scan(x: Tensor, y: Tensor) -> Any:
    def step(c: Tensor, row: Tensor) -> Any:
        n = torch.cond(row.sum() > 0, lambda c, r: c.sin() + r, lambda c, r: c * r, (c, row))
        return n, n * 2

    return scan(step, y[0], x)


def _counter(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=x.device)


def _counted(x: Tensor, y: Tensor) -> Any:
    return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, (x * 1.5).sin()), (_counter(x), x))


def _counted_on_the_processor(x: Tensor, y: Tensor) -> Any:
    return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, (x * 1.5).sin()), (torch.tensor(0), x))


def _never(x: Tensor, y: Tensor) -> Any:
    return while_loop(lambda i, x: i < 0, lambda i, x: (i + 1, (x * 1.5).sin()), (_counter(x), x))


def _counted_in_python(x: Tensor, y: Tensor) -> Any:
    return while_loop(lambda i, x: i < x.shape[0], lambda i, x: (i + 20, (x * 1.5).sin() + i), (0, x))[1]


def _until(x: Tensor, y: Tensor) -> Any:
    return while_loop(lambda x: x.abs().sum() > 0.1, lambda x: (x * y[0, 0] * 0.5,), (x,))


def _branch_in_loop(x: Tensor, y: Tensor) -> Any:
    def body(i: Tensor, x: Tensor) -> Any:
        return i + 1, torch.cond(i % 2 == 0, lambda x: x - 0.5, lambda x: x * y, (x,))

    return while_loop(lambda i, x: i < 6, body, (_counter(x), x))


DIFFERENTIABLE: dict[str, Program] = {
    "branches": _branches,
    "closure": _closure,
    "strided operand": _strided_operand,
    "expanded operand": _expanded_operand,
    "transposed": _transposed,
    "nested": _nested,
    "scan of rows": _rows,
    "scan of columns, reversed": _columns_reversed,
    "scan of containers": _cells,
    "branch in scan": _branch_in_scan,
}
LOOPS: dict[str, Program] = {
    "loop": _counted,
    "loop counted on the processor": _counted_on_the_processor,
    "loop without a run": _never,
    "loop counted in Python": _counted_in_python,
    "loop until small": _until,
    "branch in loop": _branch_in_loop,
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_results_and_gradients(name: str, grad: bool) -> None:
    program = DIFFERENTIABLE[name]
    compiled = _compiled(program)
    torch.manual_seed(0)
    for sign in (1, -1):
        judge(compiled, program, [_rand(*SIZE, sign=sign), _rand(*SIZE)], grad)
    assert opforge.stats()["fallbacks"] == {}


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str) -> None:
    program = LOOPS[name]
    compiled = _compiled(program)
    torch.manual_seed(0)
    for sign in (1, -1):
        judge(compiled, program, [_rand(*SIZE, sign=sign), _rand(*SIZE)], False)
    assert opforge.stats()["fallbacks"] == {}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["branches", "nested", "branch in scan"])
def test_symbolic_sizes(name: str, grad: bool) -> None:
    """One graph for all sizes."""
    program = DIFFERENTIABLE[name]
    torch._dynamo.reset()
    opforge.reset_stats()
    compiled = torch.compile(program, backend="opforge", fullgraph=True, dynamic=True, options={"strict": True})
    torch.manual_seed(0)
    for rows in (5, 9, 3):
        for sign in (1, -1):
            judge(compiled, program, [_rand(rows, 7, sign=sign), _rand(rows, 7)], grad)
    assert opforge.stats()["graphs"] == 1
    assert opforge.stats()["fallbacks"] == {}


def test_functions_are_kernels_of_the_device() -> None:
    """A program of pointwise functions runs no eager kernel at all, but for the predicate's way to the processor."""

    def program(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos() + 1, (x,))

    x = _rand(*SIZE)
    compiled = _compiled(program)
    with torch.no_grad():
        compiled(x)
        compiled(-x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
            compiled(x)
    made = compile_fx.HISTORY[-1]
    assert made.externs == {}
    assert {name: a.kernels for name, a in made.inside.items()} == {"run_branch_then": 1, "run_branch_otherwise": 1}
    called = [e.key for e in found.key_averages() if e.key.startswith("aten::")]
    assert not [op for op in called if any(name in op for name in ("sin", "cos", "mul", "add", "sum"))], called


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["branches", "scan of rows", "loop"])
def test_with_cuda_graphs(name: str, grad: bool) -> None:
    """What runs is decided while the graph runs: such a graph is not recorded, which is counted, and its results are right all the same."""
    if name in LOOPS and grad:
        name = "branch in scan"  # eager computes gradients of loops
    program = {**DIFFERENTIABLE, **LOOPS}[name]
    torch._dynamo.reset()
    opforge.reset_stats()
    compiled = torch.compile(program, backend="opforge", fullgraph=True, options={"cudagraphs": True})
    torch.manual_seed(0)
    for _ in range(3):
        for sign in (1, -1):
            judge(compiled, program, [_rand(*SIZE, sign=sign), _rand(*SIZE)], grad)
    stats = opforge.stats()
    assert stats["fallbacks"] == {}
    assert any(" calls " in reason for reason in stats["unrecorded"]), stats["unrecorded"]


def test_strict_with_cuda_graphs_says_why_it_cannot_be() -> None:
    compiled = _compiled(_closure, cudagraphs=True)
    with torch.no_grad(), pytest.raises(Exception, match=r"cannot be recorded: .* calls cond") as raised:
        compiled(_rand(*SIZE), _rand(*SIZE))
    inner = getattr(raised.value, "inner_exception", raised.value)
    assert isinstance(inner, UnsupportedError)


def test_a_loop_counted_on_the_device_runs_on_another_stream() -> None:
    x = _rand(*SIZE)
    compiled = _compiled(_counted)
    with torch.no_grad():
        want = _counted(x, x)
        compiled(x, x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = [compiled(x, x) for _ in range(5)]
        stream.synchronize()
    for out in found:
        torch.testing.assert_close(out, want)
