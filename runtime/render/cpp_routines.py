"""Calls of routines (`ir/routines.py`): what each such step of a plan is called with, and the C++ functions that call them, with the sizes and
strides of its tensors in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ir.index import Expr
from ..ir.nodes import Buffer, Size
from ..ir.quote import comment_text
from ..kernels.plan import ViewOf
from ..kernels.routines import Routine
from .cpp import MEMORY, literal


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


__all__ = ["CppRoutine", "cpp_routine"]
