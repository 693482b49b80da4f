"""Conditions, loops and scans: their functions are compiled as graphs of their own, and what cannot be is left to eager with a reason."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

import opforge
from opforge.runtime import compile_fx
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.torch_compat import pytree
from opforge.tests.support.control_programs import (
    DIFFERENTIABLE,
    LOOPS,
    Program,
    branch_in_loop,
    branch_in_scan,
    counted,
    counted_in_python,
    nested,
    never,
    rand,
)
from opforge.tests.support.judged import judge

OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
LATER = pytest.mark.skipif(OLD, reason="C1: the older Dynamo refuses functions that write to operands or return them")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def _operand_returned(x: Tensor, y: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda a: (a, a.view(-1)), lambda a: (a.sin(), a.view(-1) + 1), (x * 2,))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_results_and_gradients(name: str, grad: bool) -> None:
    program = DIFFERENTIABLE[name]
    with opforge.config.patch(strict=True):
        compiled = torch.compile(program, backend="opforge", fullgraph=True)
        for sign in (1, -1):
            judge(compiled, program, [rand(5, 7, sign=sign), rand(5, 7)], grad)


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str) -> None:
    program = LOOPS[name]
    with opforge.config.patch(strict=True):
        compiled = torch.compile(program, backend="opforge", fullgraph=True)
        for sign in (1, -1):
            judge(compiled, program, [rand(5, 7, sign=sign), rand(5, 7)], False)


SIZED = [(name, grad) for name in ("branches", "nested", "branch in scan") for grad in (False, True)]


@pytest.mark.parametrize(("name", "grad"), [*SIZED, ("loop", False), ("loop counted in Python", False)])
def test_symbolic_sizes(name: str, grad: bool) -> None:
    """One graph for all sizes. (Gradients of loops are eager's.)"""
    program = {**DIFFERENTIABLE, **LOOPS}[name]
    with opforge.config.patch(strict=True):
        compiled = torch.compile(program, backend="opforge", fullgraph=True, dynamic=True)
        graphs = opforge.stats()["graphs"]
        for rows in (5, 9, 3):
            judge(compiled, program, [rand(rows, 7), rand(rows, 7)], grad)
            judge(compiled, program, [rand(rows, 7, sign=-1), rand(rows, 7)], grad)
        # The dtype float64 never comes here: it is for the program in eager.
        assert opforge.stats()["graphs"] == graphs + 1


def test_a_comparison_of_sizes_is_decided_while_tracing() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.cond(x.shape[0] > 4, lambda x: x.sin(), lambda x: x.cos(), (x,))

    with opforge.config.patch(strict=True), torch.no_grad():
        compiled = torch.compile(program, backend="opforge", fullgraph=True, dynamic=True)
        for rows in (3, 5, 9, 2):
            x = rand(rows, 3)
            torch.testing.assert_close(compiled(x), program(x))


CHOSEN: list[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = [
    lambda x, y: (x.sin(), y + 1),
    lambda x, y: (x.cos() * 2, y * x),
    lambda x, y: (x + 1, y.exp()),
]


def _chosen(number: int, x: Tensor, y: Tensor) -> Tensor:
    a, b = CHOSEN[min(max(number, 0), 2)](x, y)
    return a * 2 + b


def _graph_with_a_choice() -> torch.fx.GraphModule:
    """A graph as Dynamo of torch 2.14 makes it of `torch.switch`, with any torch."""
    known = getattr(torch.ops.higher_order, "switch", None)
    op = known if known is not None else type("Switch", (HigherOrderOperator,), {"__call__": None})("switch")
    root = torch.nn.Module()
    graph = torch.fx.Graph()
    number, x, y = (graph.placeholder(name) for name in ("number", "x", "y"))
    for k, function in enumerate(CHOSEN):
        setattr(root, f"branch{k}", torch.fx.symbolic_trace(function))
    functions = [graph.get_attr(f"branch{k}") for k in range(len(CHOSEN))]
    both = graph.call_function(op, (number, functions, (x, y)))
    a, b = (graph.call_function(operator.getitem, (both, k)) for k in range(2))
    graph.output((graph.call_function(operator.add, (graph.call_function(operator.mul, (a, 2)), b)),))
    return torch.fx.GraphModule(root, graph)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_one_of_several_functions(grad: bool) -> None:
    """By a tensor; a number too low runs the first, one too high the last."""
    inputs = [rand(5, 7).requires_grad_(grad) for _ in range(2)]
    with opforge.config.patch(strict=True), torch.set_grad_enabled(grad):
        compiled = opforge.compile_fx(_graph_with_a_choice(), [torch.tensor(1), *inputs])
        for number in (0, 1, 2, 7, -3):
            (result,), expected = compiled(torch.tensor(number), *inputs), _chosen(number, *inputs)
            torch.testing.assert_close(result, expected)
            if grad:
                found = torch.autograd.grad(result.sum(), inputs)
                torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), inputs))
    assert compile_fx.HISTORY[-1].externs.keys() <= {"aten.clone.default"}


def test_switch_by_a_tensor_and_by_a_size() -> None:
    switch = pytest.importorskip("torch._higher_order_ops.switch", reason="C1: switch came with torch 2.14").switch

    def program(number: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b = switch(number, CHOSEN, (x, y))
        return a * 2 + b

    x, y = rand(5, 7), rand(5, 7)
    with opforge.config.patch(strict=True), torch.no_grad():
        compiled = torch.compile(program, backend="opforge", fullgraph=True)
        for number in (0, 1, 2, 7, -3):
            torch.testing.assert_close(compiled(torch.tensor(number), x, y), _chosen(number, x, y))
        sized = torch.compile(
            lambda x, y: program(x.shape[0] - 3, x, y), backend="opforge", fullgraph=True, dynamic=True
        )
        for rows in (2, 3, 4, 5, 9):
            x, y = rand(rows, 7), rand(rows, 7)
            torch.testing.assert_close(sized(x, y), _chosen(rows - 3, x, y))


def test_functions_are_compiled_and_the_branch_not_taken_does_not_run() -> None:
    """A program of pointwise functions runs no eager kernel at all."""

    def program(x: Tensor, i: Tensor) -> Tensor:
        # The index is out of range, which only the branch that is not taken would say.
        return torch.cond(x.sum() > 0, lambda x, i: x.sin() * 2, lambda x, i: x + x[i], (x, i))

    x, i = rand(5, 7), torch.full((5,), 9)
    with opforge.config.patch(strict=True), torch.no_grad():
        compiled = torch.compile(program, backend="opforge", fullgraph=True)
        torch.testing.assert_close(compiled(x, i), x.sin() * 2)
        with pytest.raises(IndexError, match="out of"):
            compiled(-x, i)
    made = compile_fx.HISTORY[-1]
    assert made.externs == {}
    assert {name: a.kernels for name, a in made.inside.items()} == {"run_branch_then": 1, "run_branch_otherwise": 1}
    assert made.kernels == 3  # and the sum with its comparison
    calls = [op for op in _operators_of(lambda: compiled(x, i)) if "item" not in op and "local_scalar" not in op]
    assert not [op for op in calls if "sin" in op or "mul" in op or "sum" in op], calls


def _operators_of(call: Callable[[], Any]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found, torch.no_grad():
        call()
    return [e.key for e in found.key_averages() if e.key.startswith("aten::")]


@LATER
def test_results_share_no_memory_with_operands() -> None:
    x = rand(5, 7)
    with opforge.config.patch(strict=True), torch.no_grad():
        for program in (never, _operand_returned):
            out = torch.compile(program, backend="opforge", fullgraph=True)(x, x)
            for t in pytree.tree_leaves(out):
                assert t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_an_operand_that_no_branch_uses_has_a_gradient_of_zeros() -> None:
    """As with torch's own formula: `None` would be another result of `torch.autograd.grad`."""
    x, y = rand(5, 7).requires_grad_(), rand(5, 7).requires_grad_()

    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x, y: x.sin(), lambda x, y: x.cos() * y, (x, y))

    with opforge.config.patch(strict=True):
        compiled = torch.compile(program, backend="opforge", fullgraph=True)(x, y)
    assert torch.equal(torch.autograd.grad(compiled.sum(), y)[0], torch.zeros(5, 7))
    assert torch.equal(torch.autograd.grad(program(x, y).sum(), y)[0], torch.zeros(5, 7))


def test_a_gradient_runs_functions_under_the_autocast_of_the_call() -> None:
    """Outside of it the gradient of a product in bfloat16 was that of another one in float32."""

    def program(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.cond(x.sum() > 0, lambda x: x @ x.t(), lambda x: x @ x.t() + 1, (x,))

    x = rand(5, 7).requires_grad_()
    with opforge.config.patch(strict=True):
        ours = torch.compile(program, backend="opforge", fullgraph=True)(x)
    assert ours.dtype is torch.bfloat16
    theirs = program(x)
    torch.testing.assert_close(*(torch.autograd.grad(t.sin().sum(), x)[0] for t in (ours, theirs)))


def test_random_numbers_of_a_branch_are_those_of_eager() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: torch.nn.functional.dropout(x, 0.5), lambda x: x * 2, (x,))

    x = rand(5, 7)
    with opforge.config.patch(strict=True), torch.no_grad():
        compiled = torch.compile(program, backend="opforge", fullgraph=True)
        for sign in (1, -1):
            torch.manual_seed(3)
            found = compiled(sign * x)
            torch.manual_seed(3)
            torch.testing.assert_close(found, program(sign * x))


def _writes(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x.add_(1).sum(), lambda x: x.sum(), (x,))


def _sizes_differ(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x[:2].clone(), lambda x: x[:3] * 2, (x,))


def _sizes_from_data(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x[x > 0.5].sum(), lambda x: x.sum(), (x,))


def _drops(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: torch.nn.functional.dropout(x, 0.5), lambda x: x * 2, (x,))


def test_sizes_from_data_inside_of_a_function() -> None:
    before = dict(opforge.stats()["fallbacks"])
    compiled = torch.compile(_sizes_from_data, backend="opforge", fullgraph=True)
    for sign in (-1, 1):
        x = rand(5, 7, sign=sign)
        torch.testing.assert_close(compiled(x), _sizes_from_data(x))
    assert dict(opforge.stats()["fallbacks"]) == before


@pytest.mark.parametrize(
    ("program", "grad", "reason"),
    [
        pytest.param(
            _writes, False, "a write to an operand inside of a function of cond (test_control.py:", marks=LATER
        ),
        (_sizes_differ, False, "branches with results of different sizes of cond (test_control.py:"),
        (_drops, True, "would run a second time with other random numbers"),
        (lambda x: counted(x, x)[1], True, "needs values of as many runs as data decides"),
    ],
    ids=["write", "sizes differ", "random numbers in a gradient", "gradient of a loop"],
)
def test_the_rest_is_eager_with_a_reason(program: Program, grad: bool, reason: str) -> None:
    before = dict(opforge.stats()["fallbacks"])
    compiled = torch.compile(program, backend="opforge", fullgraph=True)
    for sign in (-1, 1):
        ours, theirs = (rand(5, 7, sign=sign).requires_grad_(grad) for _ in range(2))
        theirs.data.copy_(ours.detach())
        with torch.set_grad_enabled(grad):
            torch.manual_seed(1)
            found = compiled(ours)
            torch.manual_seed(1)
            torch.testing.assert_close(found, program(theirs))
        torch.testing.assert_close(ours, theirs)
    new = [r for r, n in opforge.stats()["fallbacks"].items() if n != before.get(r, 0)]
    assert len(new) == 1
    assert reason in new[0]


def test_stages_of_functions_are_dumped(tmp_path: Path) -> None:
    x = rand(5, 7)
    with opforge.config.patch(strict=True, dump_dir=str(tmp_path)), torch.no_grad():
        torch.compile(branch_in_loop, backend="opforge", fullgraph=True)(x, x)
    (folder,) = tmp_path.iterdir()
    names = {p.name.partition("_")[2]: p for p in folder.iterdir()}
    loop = names["run_loop.py"].read_text()
    assert "while test(a0, a1, a2)[0].item():" in loop
    assert "    (a0, a1) = step(a0, a1, a2)" in loop
    assert "if predicate.item():" in names["run_loop_step_run_branch.py"].read_text()
    for name in ("run_loop_test_loop_ir.txt", "run_loop_step_run_branch_then_kernels.cpp", "run_loop_step_graph.py"):
        assert names[name].read_text()


def test_explain_shows_the_functions() -> None:
    x = rand(5, 7)
    with torch.no_grad():
        said = opforge.explain(branch_in_loop)(x, x).details()
    for part in (
        "## run_loop",
        "while test(",
        "# graph 0, run_loop_step: ",
        "# graph 0, run_loop_step, run_branch_then: ",
    ):
        assert part in said


def test_the_recorded_graph_runs_in_eager() -> None:
    """Its nodes are calls that torch takes, with graphs that return flat tuples: a backward that cannot be compiled runs so."""
    graphs: list[Any] = []

    def keep(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Program:
        graphs.append((trace(gm, inputs), inputs))
        return gm.forward

    x, y = rand(5, 7), rand(5, 7)
    with torch.no_grad():
        for program in (nested, branch_in_loop, branch_in_scan, counted_in_python):
            expected = pytree.tree_leaves(torch.compile(program, backend=keep, fullgraph=True)(x, y))
            traced, inputs = graphs.pop()
            found = torch.fx.Interpreter(traced.graph).run(*inputs)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b)
