"""Lowering as for a GPU, without one: the graph is traced on the processor, and lowered by what is known of a GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from opforge.errors import UnsupportedError
from opforge.runtime import compile_fx, compile_graph
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.ir.nodes import Extern
from opforge.runtime.lower import graph as lowering
from opforge.runtime.lower.graph import _atomic, _Contradiction, _Lowerer
from opforge.testing.op_check import Case, Op, _cases, _leaves, exists


def native_overloads(op: Op) -> set[str]:
    """Of the entry's overloads those for which loops are made as for a GPU, in one of the calls of the generated test."""
    return {o for o in filter(exists, op.overloads) if any(_answers(case) for case in _cases(op, o))}


def _answers(case: Case) -> bool:
    leaves, spec = torch.utils._pytree.tree_flatten((case.args, case.kwargs))

    def program(*given: torch.Tensor) -> list[Any]:
        rest = iter(given)
        own = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        values = _leaves(case.call(*torch.utils._pytree.tree_unflatten(own, spec)))
        return [v.clone() if isinstance(v, torch.Tensor) else v for v in values]

    try:
        with torch.inference_mode():  # torch takes nothing apart
            graph = trace(program, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]).graph
        if not any(str(node.target) == case.overload for node in graph.graph.nodes):
            return False
        lowerer = _Lowerer(graph, "cpu", True, 0)
        lowerer.b.device, lowerer.b.atomic, lowerer.b.unordered = "cuda", _atomic(), True
        items = lowerer.run({}).program.items
    except _Contradiction:
        return True  # of a result that the processor leaves empty
    except UnsupportedError:
        return False
    return not any(isinstance(item, Extern) for item in items)


class _GpuLowerer(_Lowerer):
    """Lowers as for a GPU, for tensors on the processor."""

    def __init__(self, gm: torch.fx.GraphModule, device: str, checks: bool, products: int) -> None:
        super().__init__(gm, "cuda", checks, 0)  # small products are loops on the CPU only
        self.device = self.numbers.device = "cpu"


@contextlib.contextmanager
def lowered_for_a_gpu() -> Iterator[None]:
    """All graphs that are compiled meanwhile are rewritten and lowered that way."""
    kept = compile_fx.rewrite, lowering._Lowerer
    compile_fx.rewrite = compile_graph.rewrite = functools.partial(kept[0], device="cuda")
    lowering._Lowerer = _GpuLowerer  # type: ignore[misc]
    try:
        yield
    finally:
        compile_fx.rewrite, lowering._Lowerer = kept  # type: ignore[misc]
        compile_graph.rewrite = kept[0]


__all__ = ["lowered_for_a_gpu", "native_overloads"]
