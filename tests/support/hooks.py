"""The cells of the matrix of hooks: their programs, with backwards that compiled autograd captures, and each against eager."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from opforge import compiled_autograd

from .matrix import Axes, Cell, Matrix

Tensor = torch.Tensor
Compile = Callable[[torch.fx.GraphModule], Callable[..., Any]]


def function(
    backward: Callable[..., Any], forward: Callable[[Tensor], Tensor] = torch.sin
) -> Callable[[Tensor], Tensor]:
    """An autograd function of one tensor. Its `backward` is given a gradient, and the tensor."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return backward(grad, *ctx.saved_tensors)

    applied: Callable[[Tensor], Tensor] = Function.apply
    return applied


def fail(text: str) -> None:
    raise ValueError(text)


@dataclass
class Log:
    """What a program tells of its backward: events, the values that they name, and the error that it ends with."""

    leaves: Sequence[Tensor]
    events: list[tuple[Any, ...]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    error: tuple[str, str] = ("", "")

    def note(self, name: str, *tensors: Tensor | None) -> None:
        """An event."""
        kinds = [None if t is None else (t.dtype, t.layout, tuple(t.shape)) for t in tensors]
        self.events.append((name, *(leaf.grad is not None for leaf in self.leaves), *kinds))
        self.values += [t.detach().to_dense().clone() for t in tensors if t is not None]


@functools.lru_cache(maxsize=4096)
def _function(name: str, arguments: str, lines: Sequence[str], result: str) -> Callable[..., Any]:
    """A function of lines of the spec. It finds `torch` and the helpers above."""
    source = "".join(f"    {line}\n" for line in (*lines, f"return {result}"))
    namespace: dict[str, Any] = {"torch": torch, "function": function, "fail": fail, "checkpoint": checkpoint}
    exec(compile(f"def {name}({arguments}):\n{source}", "<hooks>", "exec"), namespace)
    made: Callable[..., Any] = namespace[name]
    return made


def _forward(axes: Axes, cell: Cell) -> tuple[Callable[..., Any], ...]:
    """The parts of the graph, or all of it: made once, so that Dynamo compiles them once."""
    graph = axes["graph"][cell["graph"]]
    how, first, last = graph.get("compiled", ""), tuple(graph["first"]), tuple(graph["last"])
    made = [_function("first", "a, b", first, "(u, v)"), _function("last", "a, b, u, v", last, "outs")]
    if how == "whole":
        made = [_function("whole", "a, b", (*first, *last), "outs")]
    return tuple(torch.compile(f, backend="opforge") if how else f for f in made)


def run_cell(axes: Axes, cell: Cell, forward: Sequence[Callable[..., Any]], compile: Compile | None) -> Log:
    """Run the program of a cell, its backward by eager's engine for None, else captured and compiled."""
    torch.manual_seed(0)
    a, b = leaves = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    log, kept, later = Log(leaves), list[Any](), list[Callable[[], None]]()

    def keep(thing: Any) -> Any:
        kept.append(thing)
        return thing

    engine = torch.autograd.Variable
    helpers = {
        "note": log.note,
        "keep": keep,
        "later": later.append,
        "ended": lambda f: engine._execution_engine.queue_callback(f),  # the engine of the moment
        "node": lambda t: get_gradient_edge(t).node,
    }
    hang = _function("hang", f"t, a, {', '.join(helpers)}", tuple(axes["hook"][cell["hook"]]["code"]), "t")
    hook = functools.partial(hang, a=a, **helpers)
    place = axes["place"][cell["place"]]
    before, between, after = (tuple(place.get(key, ())) for key in ("before", "between", "after"))
    u = v = None
    a, b = _function("before", "a, b, hook", before, "(a, b)")(a, b, hook)
    if len(forward) == 1:
        (whole,) = forward
        outs = whole(a, b)
    else:
        first, last = forward
        u, v = first(a, b)
        u, v = _function("between", "u, v, hook", between, "(u, v)")(u, v, hook)
        outs = last(a, b, u, v)
    outs = _function("after", "outs, hook", after, "outs")([*outs], hook)
    starts = [torch.full_like(t, 0.5) for t in outs]
    backward = _function(
        "backward", "outs, starts, u, leaves, note", tuple(axes["backward"][cell["backward"]]["code"]), "None"
    )
    with compiled_autograd.enable(compile) if compile is not None else nullcontext():
        try:
            backward(outs, starts, u, leaves, log.note)
        except Exception as error:  # noqa: BLE001  # which one is what is compared
            log.error = type(error).__name__, (str(error).splitlines() or [""])[0]
    for f in later:
        f()
    log.note("end", *(leaf.grad for leaf in leaves))
    return log


def difference(eager: Log, captured: Log, exact: bool) -> str:
    """How a captured backward differs from eager's, or ""."""
    if eager.error != captured.error:
        return f"error {captured.error}, in eager {eager.error}"
    if eager.events != captured.events:
        pairs = itertools.zip_longest(captured.events, eager.events)
        return next(f"event {k}: {have}, in eager {want}" for k, (have, want) in enumerate(pairs) if have != want)
    for k, (have, want) in enumerate(zip(captured.values, eager.values, strict=True)):
        try:
            torch.testing.assert_close(have, want, equal_nan=True, **({"rtol": 0, "atol": 0} if exact else {}))
        except AssertionError as error:
            return f"value {k}: {str(error).splitlines()[0]}"
    return ""


def check_cells(matrix: Matrix, cells: Iterable[Cell], compiled: bool = False) -> None:
    """Fail with every cell whose captured backward differs from eager's. `compiled`: opforge compiles what is captured."""
    compiled_autograd.reset()
    torch._dynamo.reset()
    compile: Compile = torch.compile(backend="opforge") if compiled else lambda graph: graph
    found, count = list[str](), 0
    forward: dict[str, tuple[Callable[..., Any], ...]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for cell in cells:
            parts = forward.setdefault(cell["graph"], _forward(matrix.axes, cell))
            eager = run_cell(matrix.axes, cell, parts, None)
            exact = not compiled and "compiled" not in matrix.axes["graph"][cell["graph"]]
            text = difference(eager, run_cell(matrix.axes, cell, parts, compile), exact)
            count += 1
            if text:
                found.append(f"{'-'.join(cell.values())}: {text}")
    compiled_autograd.reset()
    assert count
    if found:
        pytest.fail(f"{len(found)} of {count} cells differ from eager:\n" + "\n".join(found[:40]), pytrace=False)


def sample(matrix: Matrix) -> list[Any]:
    """A cell of every hook, fixed, with random members of the other axes. Every second one is a slow test."""
    rows = [list(matrix.cells(hook=hook)) for hook in matrix.axes["hook"]]
    chosen = [random.Random(str(k)).choice(row) for k, row in enumerate(rows)]
    return [
        pytest.param(cell, marks=[pytest.mark.slow] if k % 2 else [], id="-".join(cell.values()))
        for k, cell in enumerate(chosen)
    ]
