"""Calls of routines (`ir/routines.py`): what each such step of a plan is called with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ir.index import Expr, Sym
from ..ir.nodes import Buffer, Ref, Size
from ..ir.routines import routine_of
from .operands import view_of
from .plan import ExternStep, Plan, ViewOf


@dataclass(frozen=True)
class Routine:
    """One call: the name of the function that makes it, the routine's file and function, the tensors that it reads and writes (in order), and its
    numbers. The function takes the addresses of all buffers, then sizes that only the running program knows.
    """

    name: str
    file: str
    function: str
    inputs: tuple[ViewOf, ...]
    results: tuple[ViewOf, ...]
    numbers: tuple[Size | float, ...]
    origin: str

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(v.buffer for v in self.inputs)

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(v.buffer for v in self.results)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the size symbols in sizes, strides and numbers: what a function for a GPU takes."""
        given = [n for v in (*self.inputs, *self.results) for n in (*v.shape, *v.stride, v.offset)]
        exprs = [n for n in (*given, *self.numbers) if isinstance(n, Expr)]
        return tuple(sorted({a.name for e in exprs for a in e.atoms() if isinstance(a, Sym)}))


def routine_call(step: ExternStep, layouts: Mapping[str, Buffer]) -> Routine | None:
    """How a step is called; None where it is no routine's."""
    found = routine_of(step.call)
    if found is None:
        return None
    file, function = found
    inputs = tuple(view_of(a, layouts) for a in step.args if isinstance(a, (Ref, ViewOf)))
    results = tuple(view_of(Ref(name), layouts) for name in step.out)
    numbers = tuple(a for a in step.args if not isinstance(a, (Ref, ViewOf)))
    return Routine(f"{function}_{step.out[0]}", file, function, inputs, results, numbers, step.call.origin)


def routines_of(plan: Plan) -> list[Routine]:
    """All calls of routines in a plan."""
    found = (routine_call(step, plan.layouts) for step in plan.steps if isinstance(step, ExternStep))
    return [r for r in found if r is not None]


__all__ = ["Routine", "routine_call", "routines_of"]
