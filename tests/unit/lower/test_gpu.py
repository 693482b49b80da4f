"""Graphs of tensors on a GPU, lowered without one: which operators stay loops there, and the dtypes of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from opforge.generated.rewrites import RULES
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.graph.rewrite import rewrite
from opforge.runtime.ir.nodes import Extern, Program
from opforge.runtime.lower.graph import lower

ATEN = torch.ops.aten


INDEX = (5,)  # the shape of positions


def lowered(fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Program:
    """The program of `fn` over fake tensors on a GPU."""
    with torch.no_grad():
        with FakeTensorMode():
            dtypes = [torch.int64 if s is INDEX else dtype for s in shapes]
            inputs = [torch.empty(s, dtype=d, device="cuda") for s, d in zip(shapes, dtypes, strict=True)]
        return lower(trace(fn, inputs).graph, device="cuda").program


def externs(program: Program) -> list[str]:
    return [i.target for i in program.items if isinstance(i, Extern)]


def test_statistics_have_the_dtype_of_a_gpu() -> None:
    program = lowered(lambda x, w: ATEN.native_layer_norm(x, [8], w, w, 1e-5), (4, 8), (8,))
    assert not externs(program)
    table = program.shapes()
    assert [table[str(o.buffer)].dtype for o in program.outputs] == ["bfloat16", "float32", "float32"]


def test_results_that_nobody_reads_may_differ() -> None:
    """Statistics that `batch_norm` does not make in evaluation have another size on a GPU."""
    program = lowered(F.batch_norm, (2, 3, 4, 4), (3,), (3,), (3,), (3,), dtype=torch.float32)
    assert not externs(program)


def test_batch_norm_that_is_evaluated_has_statistics_on_a_gpu() -> None:
    """With gradients they are kept; the graph was left to eager, since on a processor they have no elements."""

    def fn(x: Any, c: Any) -> Any:
        return ATEN.native_batch_norm(x, c, c, c, c, False, 0.1, 1e-5)

    program = lowered(fn, (2, 8, 4, 4), (8,))
    assert not externs(program)
    table = program.shapes()
    results = [table[str(o.buffer)] for o in program.outputs]
    assert [(b.dtype, b.shape) for b in results[1:]] == [("float32", (8,)), ("float32", (8,))]


def test_batch_norm_in_training_has_statistics_of_a_gpus_dtype() -> None:
    def fn(x: Any, c: Any) -> Any:
        return ATEN.native_batch_norm(x, c, c, None, None, True, 0.1, 1e-5)

    program = lowered(fn, (2, 8, 4, 4), (8,))
    assert not externs(program)
    table = program.shapes()
    assert [table[str(o.buffer)].dtype for o in program.outputs] == ["bfloat16", "float32", "float32"]


def test_indexed_updates() -> None:
    assert not externs(lowered(lambda x, y, i: x.index_add(0, i, y), (4, 8), (5, 8), INDEX))
    assert not externs(lowered(lambda x, y, i: x.index_copy(0, i, y), (4, 8), (5, 8), INDEX))


def test_several_values_for_one_place_in_a_deterministic_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager's kernel decides which one stays."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    for fn in (lambda x, y, i: x.index_copy(0, i, y), lambda x, y, i: x.index_put((i,), y)):
        (call,) = externs(lowered(fn, (4, 8), (5, 8), INDEX))
        assert call.startswith("aten.index_")


@pytest.mark.parametrize(("dtype", "loops"), [(torch.float32, False), (torch.int64, True)])
def test_deterministic_sums(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, loops: bool) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    program = lowered(lambda x, y, i: x.index_add(0, i, y), (4, 8), (5, 8), INDEX, dtype=dtype)
    assert not externs(program) if loops else externs(program) == ["aten.index_add.default"]


def test_a_bias_of_a_convolution_is_added_and_summed_by_our_kernels() -> None:
    def fn(x: Any, w: Any, b: Any, g: Any) -> Any:
        y = ATEN.convolution(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        settings = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return torch.relu(y), ATEN.convolution_backward(g, x, w, *settings, [True, True, True])

    shapes = ((2, 3, 8, 8), (4, 3, 3, 3), (4,), (2, 4, 8, 8))
    with torch.no_grad():
        with FakeTensorMode():
            inputs = [torch.empty(s, device="cuda") for s in shapes]
        traced = trace(fn, inputs)
        rewrite(traced.graph, RULES)
        program = lower(traced.graph, device="cuda").program
    forward, backward = (i for i in program.items if isinstance(i, Extern))
    assert forward.args[2] is None
    assert backward.args[-1] == [True, True, False]


def test_a_batch_norm_in_training_follows_from_its_statistics() -> None:
    """Its values can be computed again without the statistics, and its backward reads no running ones."""

    def fn(x: Any, c: Any, g: Any) -> Any:
        y, mean, scale, *running = ATEN._native_batch_norm_legit_functional(x, c, c, c, c, True, 0.1, 1e-5)
        back = ATEN.native_batch_norm_backward(g, x, c, running[0], running[1], mean, scale, True, 1e-5, [True] * 3)
        return y, back[0]

    with torch.no_grad():
        with FakeTensorMode():
            x, c = (torch.empty(s, device="cuda") for s in ((2, 8, 4, 4), (8,)))
        traced = trace(fn, [x, c, x.clone()])
        applied = [rule for rule, _ in rewrite(traced.graph, RULES).applied]
    assert {"batch_norm_values", "batch_norm_backward_in_training"} <= set(applied)
    nodes = {str(n.target): n for n in traced.graph.graph.nodes}
    assert nodes["aten.native_batch_norm_backward.default"].args[3:5] == (None, None)


def test_products_of_odd_rows_share_their_padded_operands() -> None:
    """A linear layer of an odd number of outputs: its weight and the gradient of its result are each padded once for three products."""

    def fn(x: Any, w: Any, g: Any) -> Any:
        return ATEN.mm(x, ATEN.t(w)), ATEN.mm(ATEN.t(g), x), ATEN.mm(g, w)

    with torch.no_grad():
        with FakeTensorMode():
            shapes = ((512, 128), (1029, 128), (512, 1029))
            inputs = [torch.empty(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
        traced = trace(fn, inputs)
        rewrite(traced.graph, RULES)
    targets = [str(n.target) for n in traced.graph.graph.nodes]
    assert targets.count("aten.constant_pad_nd.default") == 2
    assert targets.count("aten.mm.default") == 3
