"""The C++ functions that call routines (`ir/routines.py`): one for each such step of a plan, with the sizes and strides of its tensors in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ir.index import Expr
from ..ir.nodes import Buffer, Ref, Size
from ..ir.routines import routine_of
from ..schedule.operands import view_of
from ..schedule.plan import ExternStep, Plan, ViewOf
from .cpp import MEMORY, literal


@dataclass(frozen=True)
class Routine:
    """One call: the C symbol, the routine's file, the buffers that it reads and writes (in order), the sizes that only the running program
    knows, and the text of the function, which takes the addresses of all buffers and then these sizes.
    """

    name: str
    file: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    sizes: tuple[Size, ...]
    text: str


def routine_call(step: ExternStep, layouts: Mapping[str, Buffer]) -> Routine | None:
    """How a step is called; None where it is no routine's."""
    found = routine_of(step.call)
    if found is None:
        return None
    file, function = found
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

    reads = [view_of(a, layouts) for a in step.args if isinstance(a, (Ref, ViewOf))]
    writes = [view_of(Ref(name), layouts) for name in step.out]
    given = [tensor(v, f"a{k}", "const ") for k, v in enumerate(reads)]
    given += [tensor(v, f"a{k}", "") for k, v in enumerate(writes, len(reads))]
    for a in step.args:
        if isinstance(a, float):
            given.append(literal(a, "float64"))
        elif isinstance(a, bool):
            given.append("true" if a else "false")
        elif not isinstance(a, (Ref, ViewOf)):
            assert isinstance(a, (int, Expr)), a
            given.append(number(a))
    name = f"{function}_{step.out[0]}"
    kinds = [f"const {MEMORY[layouts[v.buffer].dtype]}*" for v in reads]
    kinds += [f"{MEMORY[layouts[v.buffer].dtype]}*" for v in writes]
    parameters = [f"{kind} a{k}" for k, kind in enumerate(kinds)] + [f"int64_t s{k}" for k in range(len(sizes))]
    head = f"// {step.call.origin}\n" if step.call.origin else ""
    head += f'extern "C" __attribute__((visibility("default"))) void {name}({", ".join(parameters)})'
    text = f"{head} {{\n    {file}::{function}({', '.join(given)});\n}}\n"
    return Routine(name, file, tuple(v.buffer for v in reads), step.out, tuple(sizes), text)


def routines_of(plan: Plan) -> list[Routine]:
    """All calls of routines in a plan."""
    found = (routine_call(step, plan.layouts) for step in plan.steps if isinstance(step, ExternStep))
    return [r for r in found if r is not None]


__all__ = ["Routine", "routine_call", "routines_of"]
