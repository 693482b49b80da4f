"""The backward of a training graph as data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import opforge
from opforge.errors import BuildError, UnsupportedError
from opforge.runtime.backward.compiled import ALWAYS, CompiledBackward, Saved, Watched, watched_tensors
from opforge.runtime.backward.function import bind_function
from opforge.runtime.backward.source import emit_function
from opforge.runtime.backward.variants import Boxed, Variants, interpreted
from opforge.runtime.dispatch.autograd.joint import Gradients
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.training import split


def backward_of(f: Callable[..., Any], *args: Tensor) -> CompiledBackward:
    return split(trace(f, args, training=True)).backward


def two_results(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin() * y, y.exp()


def arguments() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)


def test_what_is_saved_says_who_needs_it() -> None:
    spec = backward_of(lambda x, y: (x * y, y.exp()), *arguments())
    assert spec.partial
    assert not spec.symbolic
    kept = {s.place: s for s in spec.saved}
    assert kept["input", 0].needed_for == kept["input", 1].needed_for == 0b01
    assert kept["output", 1].needed_for == 0b10  # the exponential is its own derivative
    assert kept["input", 0].expected == (torch.device("cpu"), torch.float32, torch.Size([3]), (1,))
    assert not kept["input", 0].described_by_forward
    assert kept["output", 1].expected is None


def test_one_result_needs_all_that_is_saved() -> None:
    spec = backward_of(lambda x, y: x * y, *arguments())
    assert not spec.partial
    assert [s.needed_for for s in spec.saved] == [ALWAYS, ALWAYS]


def test_what_is_watched_is_what_eager_reads_and_nobody_saves() -> None:
    gradients = Gradients((0,), (0, 1), (), watched_inputs=(0, 1, 2), watched_results=(0,), bumped=(2,))
    saved = [Saved(("input", 0), True)]
    found = watched_tensors(gradients, saved, partial=False, held=frozenset({1}))
    assert found == (
        Watched(("input", 1), 0, ALWAYS, is_held=True),
        Watched(("input", 2), 1, ALWAYS),
        Watched(("output", 0), 0, ALWAYS),
    )


@pytest.mark.parametrize("undefined", [0b01, 0b10])
def test_a_variant_is_another_graph(undefined: int) -> None:
    args = arguments()
    spec = backward_of(two_results, *args)
    before = str(spec.graph.graph)
    variant = spec.variant(undefined)
    assert str(spec.graph.graph) == before
    assert spec.variant(0) is spec.graph
    tangents = [t.zeros() if undefined >> k & 1 else torch.rand(3) for k, t in enumerate(spec.tangents)]
    results = [r for k, r in enumerate(two_results(*args)) if not undefined >> k & 1]
    alone = [t for k, t in enumerate(tangents) if not undefined >> k & 1]
    wanted = torch.autograd.grad(results, args, alone, allow_unused=True)
    got = interpreted(variant)(_saved(spec, args, tangents))
    by_input = dict(zip(spec.gradients.inputs, got, strict=True))
    for k, want in enumerate(wanted):
        assert (by_input[k] is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(by_input[k], want)
    assert {k for k, g in enumerate(got) if g is None} == spec.unreached(undefined)


def _saved(spec: CompiledBackward, args: tuple[Tensor, ...], tangents: list[Tensor]) -> list[Tensor]:
    """What the forward of `two_results` keeps, then tangents."""
    parts = split(trace(two_results, args, training=True))
    out = parts.forward(*(a.detach() for a in args))
    return [
        *(args[k].detach() if where == "input" else out[k] for where, k in (s.place for s in spec.saved)),
        *tangents,
    ]


def counted(made: list[fx.GraphModule], error: Exception | None = None) -> Callable[..., Boxed]:
    def compile(graph: fx.GraphModule, into: Mapping[int, int]) -> Boxed:
        made.append(graph)
        if error is not None and len(made) == 1:
            raise error
        return interpreted(graph, into)

    return compile


def test_each_variant_is_compiled_once_by_threads() -> None:
    spec = backward_of(two_results, *arguments())
    made: list[fx.GraphModule] = []
    variants = Variants(spec, counted(made))
    threads = [threading.Thread(target=variants.program, args=(k % 3,)) for k in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(made) == 3
    assert variants.program() is variants.program(0)


def test_what_cannot_be_compiled_is_tried_again() -> None:
    spec = backward_of(two_results, *arguments())
    made: list[fx.GraphModule] = []
    variants = Variants(spec, counted(made, BuildError("no compiler")))
    with pytest.raises(BuildError, match="no compiler"):
        variants.program()
    assert callable(variants.program())
    assert len(made) == 2


def test_with_symbolic_sizes_no_other_graph_is_compiled() -> None:
    spec = replace(backward_of(two_results, *arguments()), symbolic=True)
    made: list[fx.GraphModule] = []
    variants = Variants(spec, counted(made))
    variants.program(0b01)
    assert made == [spec.graph]


def test_strict_refuses_gradients_that_are_not_strided() -> None:
    spec = backward_of(two_results, *arguments())
    with pytest.raises(UnsupportedError, match="sparse"):
        Variants(spec, interpreted, strict=True).by_eager_kernels(0)


def test_the_source_takes_sizes_before_tensors_where_the_graph_does() -> None:
    """A user's compilers get sizes first; hooks on saved tensors find the tensors behind them."""
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t.clone()

    def program(x: Tensor, w: Tensor) -> Tensor:
        return (x.sin() * w.cos()).view(-1) * x.numel()

    compiled = opforge.aot_function(program, fw_compiler=opforge.aot.nop, dynamic=True)
    args = [torch.rand(n, 3, requires_grad=True) for n in (4, 4)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        compiled(*args).sum().backward()
    assert packed
    found = [a.grad for a in args]
    want = torch.autograd.grad(program(*args).sum(), args)
    torch.testing.assert_close(found, list(want))


def test_the_source_is_short() -> None:
    text = emit_function(backward_of(lambda x, y: x * y, *arguments()))
    assert "else program()" in text
    assert "ctx.save_for_backward(x0, x1)" in text


@pytest.mark.parametrize("layout", ["strided", "sparse"])
def test_what_fails_before_it_runs_can_be_asked_for_again(layout: str) -> None:
    """An interrupt while something is compiled, or a refusal, leaves what was saved where it is."""
    x = torch.rand(4, 4, requires_grad=True)
    spec = backward_of(lambda x: x.sin(), x)
    failing = [KeyboardInterrupt(), None]

    def compile(graph: fx.GraphModule, into: Mapping[int, int]) -> Boxed:
        if (error := failing.pop(0)) is not None:
            raise error
        return interpreted(graph, into)

    forward = split(trace(lambda x: x.sin(), [x], training=True)).forward
    compiled = bind_function(spec, no_grad(forward), Variants(spec, compile, strict=True))
    (y,) = compiled(x)
    if layout == "sparse":
        with pytest.raises(UnsupportedError, match="sparse"):
            torch.autograd.grad(y, x, torch.eye(4).to_sparse())
        failing.pop(0)
    else:
        with pytest.raises(KeyboardInterrupt):
            torch.autograd.grad(y, x, torch.eye(4))
    torch.testing.assert_close(torch.autograd.grad(y, x, torch.eye(4)), (torch.eye(4) * x.detach().cos(),))


def no_grad(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch.no_grad():
            return forward(*args)

    return run
