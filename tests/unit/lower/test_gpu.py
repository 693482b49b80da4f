"""Graphs of tensors on a GPU, lowered without one: which operators stay loops there, and the dtypes of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from opforge.runtime.dispatch.trace import trace
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
    assert externs(lowered(lambda x, y, i: x.index_copy(0, i, y), (4, 8), (5, 8), INDEX)) == ["aten.index_copy.default"]


@pytest.mark.parametrize(("dtype", "loops"), [(torch.float32, False), (torch.int64, True)])
def test_deterministic_sums(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, loops: bool) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    program = lowered(lambda x, y, i: x.index_add(0, i, y), (4, 8), (5, 8), INDEX, dtype=dtype)
    assert not externs(program) if loops else externs(program) == ["aten.index_add.default"]
