"""Compilers that users pass in: how they are called, and a few small ones to start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.passes.shape_prop import TensorMetadata

Compiled = Callable[..., Any]
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Compiled]
Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
Decompositions = dict[Any, Callable[..., Any]]


@dataclass(frozen=True)
class Compilers:
    """What a user passed. `wrap_backward` is put around the compiled backward, which the autograd engine calls."""

    forward: Compiler
    backward: Compiler
    inference: Compiler
    partition: Partitioner
    decompositions: Decompositions = field(default_factory=dict)
    keep_mutations: bool = False
    wrap_backward: Callable[[Compiled], Compiled] = lambda compiled: compiled


def check_functions(**given: Any) -> None:
    """Raises TypeError, with the argument's name, for what was given in the place of a function and is none."""
    for name, value in given.items():
        if not callable(value) and not (value is None and name in _MAY_BE_LEFT_OUT):
            raise TypeError(f"{name} must be a function, {_USES[name]}; got {value!r}, a {type(value).__name__}")


_MAY_BE_LEFT_OUT = ("bw_compiler", "inference_compiler")
_COMPILER = "(graph module, fake inputs) → callable"
_USES = {
    "fn": "the program to compile",
    "fw_compiler": _COMPILER,
    "bw_compiler": _COMPILER,
    "inference_compiler": _COMPILER,
    "partition_fn": "(joint module, (primals, tangents), *, num_fwd_outputs, **others) → (forward, backward)",
}


def nop(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """A compiler that runs the graph as it is, by eager kernels."""
    return gm


def print_compile(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """A compiler that prints the graph and runs it as it is."""
    print(gm.print_readable(print_output=False))
    return gm


def make_boxed_func(f: Compiled) -> Compiled:
    """`f` in the boxed convention: one list of arguments, which the callee may empty, so that what it holds is freed early."""

    def boxed(args: list[Any]) -> Any:
        return f(*args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def make_boxed_compiler(compiler: Compiler) -> Compiler:
    """A compiler whose results are boxed."""
    return lambda gm, example_inputs: make_boxed_func(compiler(gm, example_inputs))


def call_compiler(compiler: Compiler, gm: fx.GraphModule, what: str) -> Compiled:
    """Have `gm` compiled for its placeholders' fake values; the result takes them as a list, which it may empty, and returns a tuple. What
    the compiler raises is its user's to see. Raises TypeError when it returns nothing that can be called; in a call ValueError for another
    number of results than the graph has.
    """
    describe(gm.graph)
    gm.recompile()
    compiled = compiler(gm, [detached(n.meta["val"]) for n in gm.graph.nodes if n.op == "placeholder"])
    if not callable(compiled):
        raise TypeError(
            f"{what} returned a {type(compiled).__name__}; it must return a callable that takes the graph's inputs"
        )
    expected = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    run = compiled if getattr(compiled, "_boxed_call", False) else lambda args: compiled(*args)

    def checked(args: list[Any]) -> tuple[Any, ...]:
        results = _as_tuple(run(args))
        if len(results) != expected:
            raise ValueError(
                f"the function that {what} returned gave {len(results)} results; its graph returns {expected}"
            )
        return results

    return checked


def unboxed(compiled: Compiled) -> Compiled:
    """A function of a list as one of as many arguments."""
    return lambda *args: compiled(list(args))


def describe(graph: fx.Graph) -> None:
    """Give nodes the `tensor_meta` that torch's partition functions and other readers of its graphs look for."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and "tensor_meta" not in node.meta:
            node.meta["tensor_meta"] = TensorMetadata(
                value.shape, value.dtype, value.requires_grad, value.stride(), None, False, {}
            )


def detached(value: Any) -> Any:
    """A fake input as a compiler gets it: without autograd."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    with torch.no_grad():
        return value.detach()


def _as_tuple(out: Any) -> tuple[Any, ...]:
    if type(out) is tuple:
        return out
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)
