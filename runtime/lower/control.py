"""Calls of higher-order operators that run functions of the program: in the loop program they are calls of functions that are compiled beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
import torch
from torch import fx

from ...errors import UnsupportedError
from ...generated.decompositions import CONTROL
from ...generated.ops import UNSPECIFIED
from ..dispatch.operators.schema import op_info
from ..dispatch.storage.overlap import is_row_major
from ..dispatch.storage.regions import Layout
from ..dispatch.user_kernels.launches import Launch
from ..ir.nodes import Buffer
from ..observe.counters import count_extern
from ..torch_compat import HigherOrderOperator, OpOverload, auto_functionalized, python_source
from .language.builder import Builder
from .sizes.symbolic import Opaque


@dataclass(frozen=True)
class Control:
    """A function of the wrapper, which runs compiled graphs.

    name      of the function, which takes the predicate of a branch, then operands: what is carried, slices, what is given.
    runs      `branch`, `loop`, `scan` or `map`, as `specs/decompositions.yaml` explains them.
    graphs    what it runs, each with one placeholder for an operand.
    carried, sliced  numbers of such operands.
    layouts   of each operand: None where any will do (a number), () for row-major, or its strides.
    tensors   of each result, whether it is one.
    test      what a loop goes on by, as source over its operands `a0`, `a1`, …, where it is a comparison of numbers; else its first graph says.
    """

    name: str
    runs: str
    graphs: tuple[fx.GraphModule, ...]
    carried: int
    sliced: int
    layouts: tuple[tuple[int, ...] | None, ...]
    tensors: tuple[bool, ...]
    test: str = ""


@dataclass(frozen=True)
class Call:
    """A function of the wrapper that calls something of the program's; `kernel`: the operator whose eager kernel it runs."""

    name: str
    function: Callable[..., Any]
    kernel: str = ""


class Lowering(Protocol):
    """What lowers the graph around."""

    b: Builder
    env: dict[fx.Node, Any]
    controls: list[Control]
    calls: list[Call]

    def extern_argument(self, a: Any) -> Any:
        """An argument as a call gets it."""
        ...

    def buffer(self, name: str, val: torch.Tensor) -> Buffer:
        """A buffer as a fake tensor describes it."""
        ...


def call_control(lowerer: Lowering, node: fx.Node, val: Sequence[Any]) -> list[Any]:
    """The results of the call, as values of the lowerer, which has the function among its `controls` from then on. Raises
    `UnsupportedError` for an operator that the spec does not know.
    """
    target = node.target
    form = CONTROL.get(target.name()) if isinstance(target, HigherOrderOperator) else None
    if target is auto_functionalized:
        return _call_on_copies(lowerer, node, val)
    if isinstance(target, Launch):
        return _launch(lowerer, node, target, val)
    if form is None:
        raise UnsupportedError(f"{target} is not an operator overload")
    lists = {key: list(node.args[k]) for key in ("carried", "sliced", "given") if (k := getattr(form, key)) is not None}  # type: ignore[arg-type]
    operands = [o for nodes in lists.values() for o in nodes]
    graphs = tuple(lowerer.env[node.args[k]] for k in form.functions)  # type: ignore[index]
    name = lowerer.b.fresh(f"run_{form.runs}")
    predicate = [] if form.predicate is None else [node.args[form.predicate]]
    args = tuple(lowerer.extern_argument(a) for a in (*predicate, *operands))
    layouts = tuple(_layout(o) for o in operands)
    carried, sliced = (len(lists.get(key, ())) for key in ("carried", "sliced"))
    tensors, test = tuple(map(_is_tensor, val)), _comparison(graphs[0])
    lowerer.controls.append(Control(name, form.runs, graphs, carried, sliced, layouts, tensors, test))
    return _extern(lowerer, node, name, args, (), any(map(has_effect, graphs)), val)


def _extern(
    lowerer: Lowering, node: fx.Node, name: str, args: Any, kwargs: Any, effect: bool, val: Sequence[Any]
) -> list[Any]:
    outs = [lowerer.buffer(lowerer.b.fresh(f"{node.name}_{k}"), t) for k, t in enumerate(val) if _is_tensor(t)]
    places = tuple(k for k, t in enumerate(val) if _is_tensor(t)) if len(outs) < len(val) else ()
    handles = iter(lowerer.b.extern(outs, name, args, kwargs, False, effect, places, compiled=True))
    # A number that a function has made is as yet unknown.
    numbers = [Opaque(f"a number from {node.target}") if isinstance(t, torch.SymInt) else t for t in val]
    return [next(handles) if _is_tensor(t) else number for t, number in zip(val, numbers, strict=True)]


def _call_on_copies(lowerer: Lowering, node: fx.Node, val: Sequence[Any]) -> list[Any]:
    """The call of an operator that writes to its arguments, by its eager kernel, on copies of these."""
    (op,) = node.args
    assert isinstance(op, OpOverload)
    name = lowerer.b.fresh(f"run_{op._opname}")
    kwargs = tuple((k, lowerer.extern_argument(v)) for k, v in node.kwargs.items())
    lowerer.calls.append(Call(name, functools.partial(_run_on_copies, op), str(op)))
    count_extern(str(op), "it writes to its arguments, and runs on copies of them", lowerer.b.place)
    found = iter(_extern(lowerer, node, name, (), kwargs, True, _flat(val)))
    return [[next(found) for _ in v] if isinstance(v, (list, tuple)) else next(found) for v in val]


def _run_on_copies(op: OpOverload, **kwargs: Any) -> tuple[Any, ...]:
    written = [a.name for a in op._schema.arguments if a.is_write]
    copies = {name: _copied(kwargs[name]) for name in written if name in kwargs}
    returned = op(**{**kwargs, **copies})
    results = returned if isinstance(returned, tuple) else (returned,)
    return tuple(_flat((*results, *(copies.get(name) for name in written))))


def _copied(value: Any) -> Any:
    """Copies of a tensor, or of those in a list, with the same strides; gaps are copied too, and nothing before or behind."""
    if isinstance(value, (list, tuple)):
        return [_copied(t) for t in value]
    if not isinstance(value, torch.Tensor):
        return value
    reach = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
    memory = value.as_strided((reach,), (1,), value.storage_offset()).clone()
    return memory.as_strided(value.shape, value.stride())


def _flat(values: Sequence[Any]) -> list[Any]:
    """With the members of lists of tensors in their places."""
    return [t for v in values for t in (v if isinstance(v, (list, tuple)) else (v,))]


def _launch(lowerer: Lowering, node: fx.Node, launch: Launch, val: Sequence[Any]) -> list[Any]:
    """The launch of a kernel of the program, which writes into its first arguments. What nobody has written before needs no contents."""
    written, *rest = node.args
    name = lowerer.b.fresh(f"run_{launch.name}")
    lowerer.calls.append(Call(name, launch.run))
    count_extern(f"triton.{launch.name}", "a kernel of the program, launched as it is")
    fresh = [isinstance(n, fx.Node) and str(n.target) in UNSPECIFIED for n in written]  # type: ignore[union-attr]
    before = [None if new else lowerer.extern_argument(n) for n, new in zip(written, fresh, strict=True)]  # type: ignore[arg-type]
    outs = [lowerer.buffer(lowerer.b.fresh(f"{node.name}_{k}"), t) for k, t in enumerate(val)]
    args = (*before, *(lowerer.extern_argument(a) for a in rest))
    return list(lowerer.b.extern(outs, name, args, (), False, launch.effect, compiled=True, writes=len(outs)))


def _is_tensor(t: Any) -> bool:
    return isinstance(t, torch.Tensor)


def _layout(operand: Any) -> tuple[int, ...] | None:
    value = operand.meta.get("val") if isinstance(operand, fx.Node) else operand
    if not isinstance(value, torch.Tensor):
        return None
    return () if is_row_major(Layout.of(value)) else value.stride()


def _comparison(graph: fx.GraphModule) -> str:
    """What a graph returns that compares numbers, as source; "" for any other graph."""
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    result = output.args[0]
    value = result.meta.get("val") if isinstance(result, fx.Node) else None
    if not isinstance(value, torch.SymBool):
        return ""
    told: dict[sympy.Symbol, sympy.Symbol] = {}
    for k, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder"):
        given = node.meta["val"]
        parts = [("", given)]
        if isinstance(given, torch.Tensor):
            parts = [(f".size({d})", n) for d, n in enumerate(given.shape)]
        for text, number in parts:
            if isinstance(number, torch.SymInt) and number.node.expr.is_symbol:
                told.setdefault(number.node.expr, sympy.Symbol(f"a{k}{text}", integer=True))
    expr = value.node.expr
    if any(s not in told for s in expr.free_symbols):
        raise UnsupportedError(f"the condition {expr} of a loop depends on sizes that no operand has")
    return python_source(expr.xreplace(told))


def has_effect(graph: fx.GraphModule) -> bool:
    """Whether something in the graph, or in a graph that it runs, must run even if nothing uses its results."""
    modules = (m for m in graph.modules() if isinstance(m, fx.GraphModule))
    return any(isinstance(n.target, OpOverload) and op_info(n.target).keep for m in modules for n in m.graph.nodes)
