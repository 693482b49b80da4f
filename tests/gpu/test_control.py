"""Conditions, loops and scans on a CUDA device, forward and backward, judged by a float64 run; and what recording does with them. `make test-gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import opforge
from opforge.errors import UnsupportedError
from opforge.runtime import compile_fx
from opforge.tests.support.control_programs import DIFFERENTIABLE, LOOPS, Program, closure, counted, rand
from opforge.tests.support.judged import judge

pytestmark = pytest.mark.gpu
SIZE = (65, 70)


def _compiled(program: Program, **options: Any) -> Program:
    torch._dynamo.reset()
    opforge.reset_stats()
    return torch.compile(program, backend="opforge", fullgraph=True, options={"strict": True, **options})


def _rand(*size: int, sign: int = 1) -> Tensor:
    return rand(*size, sign=sign, device="cuda")


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
    compiled = _compiled(closure, cudagraphs=True)
    with torch.no_grad(), pytest.raises(Exception, match=r"not recorded as a CUDA graph: .* calls cond") as raised:
        compiled(_rand(*SIZE), _rand(*SIZE))
    inner = getattr(raised.value, "inner_exception", raised.value)
    assert isinstance(inner, UnsupportedError)


def test_a_loop_counted_on_the_device_runs_on_another_stream() -> None:
    x = _rand(*SIZE)
    compiled = _compiled(counted)
    with torch.no_grad():
        want = counted(x, x)
        compiled(x, x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = [compiled(x, x) for _ in range(5)]
        stream.synchronize()
    for out in found:
        torch.testing.assert_close(out, want)
