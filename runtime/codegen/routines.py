"""Calls of routines (`ir/routines.py`): what each such step of a plan is called with, and the C++ functions that call them, with the sizes and
strides of its tensors in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ir.index import Expr, Sym
from ..ir.nodes import Buffer, Ref, Size
from ..ir.quote import comment_text
from ..ir.routines import routine_of
from ..kernels.operands import view_of
from ..kernels.plan import ExternStep, Plan, ViewOf
from .cpp import MEMORY, literal


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


@dataclass(frozen=True)
class CppRoutine:
    """The text of the function, and the sizes that it takes after the addresses."""

    text: str
    sizes: tuple[Size, ...]


def cpp_routine(routine: Routine, layouts: Mapping[str, Buffer]) -> CppRoutine:
    """The C++ function of a call."""
    sizes: list[Size] = []

    def number(n: Size) -> str:
        if isinstance(n, Expr) and not n.is_const:
            sizes.append(n)
            return f"s{len(sizes) - 1}"
        return f"{int(n)}L"

    def tensor(view: ViewOf, address: str, const: str) -> str:
        kind = MEMORY[layouts[view.buffer].dtype]
        table = [f"{{{', '.join(map(number, part)) or '0'}}}" for part in (view.shape, view.stride)]
        return f"Strided<{const}{kind}, {len(view.shape)}>{{{address} + {number(view.offset)}, {', '.join(table)}}}"

    given = [tensor(v, f"a{k}", "const ") for k, v in enumerate(routine.inputs)]
    given += [tensor(v, f"a{k}", "") for k, v in enumerate(routine.results, len(routine.inputs))]
    for a in routine.numbers:
        if isinstance(a, float):
            given.append(literal(a, "float64"))
        elif isinstance(a, bool):
            given.append("true" if a else "false")
        else:
            given.append(number(a))
    kinds = [f"const {MEMORY[layouts[v.buffer].dtype]}*" for v in routine.inputs]
    kinds += [f"{MEMORY[layouts[v.buffer].dtype]}*" for v in routine.results]
    parameters = [f"{kind} a{k}" for k, kind in enumerate(kinds)] + [f"int64_t s{k}" for k in range(len(sizes))]
    head = f"// {comment_text(routine.origin)}\n" if routine.origin else ""
    head += f'extern "C" __attribute__((visibility("default"))) void {routine.name}({", ".join(parameters)})'
    return CppRoutine(f"{head} {{\n    {routine.file}::{routine.function}({', '.join(given)});\n}}\n", tuple(sizes))


def routines_of(plan: Plan) -> list[Routine]:
    """All calls of routines in a plan."""
    found = (routine_call(step, plan.layouts) for step in plan.steps if isinstance(step, ExternStep))
    return [r for r in found if r is not None]


__all__ = ["CppRoutine", "Routine", "cpp_routine", "routine_call", "routines_of"]
