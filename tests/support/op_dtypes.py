"""Dtypes that eager refuses: a lowering must refuse them too, so that the eager kernel runs and raises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opforge.errors import UnsupportedError
from opforge.runtime.config import current
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.ir.nodes import Extern
from opforge.runtime.lower.graph import lower
from opforge.testing.arguments import DTYPES, Made, by_default, from_text
from opforge.testing.op_check import _REJECTED, Op, _leaves, _target, exists


def refused(op: Op) -> Iterator[tuple[str, Made, Exception]]:
    """Every call of the entry's overloads, over all dtypes, that eager refuses."""
    for overload in filter(exists, op.overloads):
        schema = _target(overload)._schema
        made = from_text(op.tests[0], DTYPES) if op.tests else by_default(schema, DTYPES)
        for label, args, kwargs, _ in made:
            if label.endswith("not contiguous"):
                continue  # some kernels refuse layouts, which the tracer does not know either
            try:
                _target(overload)(*args, **kwargs)
            except _REJECTED as error:
                yield overload, Made(label, args, kwargs), error


def answers(overload: str, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether loops are made for the call, with no eager kernel that could refuse it."""
    leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def program(*given: torch.Tensor) -> list[Any]:
        rest = iter(given)
        own = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = torch.utils._pytree.tree_unflatten(own, spec)
        return [v.clone() if isinstance(v, torch.Tensor) else v for v in _leaves(_target(overload)(*args, **kwargs))]

    try:
        with torch.inference_mode():  # torch takes nothing apart
            graph = trace(program, tensors).graph
            items = lower(graph, products=current().loop_products).program.items
    except UnsupportedError:
        return False
    # A routine is an extern too, which refuses nothing.
    return not any(isinstance(item, Extern) and not item.compiled for item in items)


def lost_errors(op: Op) -> list[str]:
    """The calls that eager refuses and loops answer, one line each."""
    found = []
    for overload, (label, args, kwargs, _), error in refused(op):
        if answers(overload, args, kwargs):
            found.append(f"{overload}({label}): eager raises {type(error).__name__}: {str(error).splitlines()[0][:90]}")
    return found


__all__ = ["answers", "lost_errors", "refused"]
