"""One C++ translation unit for all kernels of a plan; kernels of equal text are written once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..ir.nodes import Size
from ..schedule.plan import Plan
from .cpp_kernel import render_kernel
from .routines import routines_of
from .tables import CppTables

KERNELS = Path(__file__).resolve().parents[2] / "generated" / "kernels"
PRELUDE = KERNELS / "prelude.h"


@dataclass(frozen=True)
class Unit:
    """Source text, and for each kernel of the plan the C symbol that runs it (layers of a model share symbols). Calls say no number of
    programs, and each runs one kernel: `programs`, `groups` and `tables` are empty. `routines`: how many sizes each call of a routine takes.
    """

    source: str
    symbols: dict[str, str]
    arity: dict[str, int]
    programs: Mapping[str, Size] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tables: frozenset[str] = frozenset()
    routines: Mapping[str, int] = field(default_factory=dict)


def render_unit(plan: Plan, *, lanes: int, threads: int, threshold: int) -> Unit:
    tables = CppTables()
    bodies: dict[str, str] = {}
    symbols: dict[str, str] = {}
    arity: dict[str, int] = {}
    texts: list[str] = []
    for kernel in plan.kernels():
        text = render_kernel(kernel, plan.layouts, tables, lanes=lanes, threads=threads, threshold=threshold)
        known = bodies.setdefault(
            anonymous(text, kernel.name, (*kernel.reads, *kernel.writes, *(b.name for b in kernel.scratch))),
            kernel.name,
        )
        symbols[kernel.name] = known
        arity[kernel.name] = len(kernel.reads) + len(kernel.writes)
        if known == kernel.name:
            texts.append(text)
    routines = routines_of(plan)
    for routine in routines:
        symbols[routine.name] = routine.name
        arity[routine.name] = len(routine.reads) + len(routine.writes)
        texts.append(routine.text)
    files = ["prelude", *sorted({f"routine_{routine.file}" for routine in routines})]
    head = "".join(f'#include "{name}.h"\n' for name in files) + "\n"
    return Unit(head + "\n".join(texts), symbols, arity, routines={r.name: len(r.sizes) for r in routines})


def with_includes(source: str, prelude: Path) -> str:
    """The source of a unit with what it includes in its place; `prelude` is the file that stands for the prelude."""

    def text(found: re.Match[str]) -> str:
        return (prelude if found[1] == PRELUDE.name else KERNELS / found[1]).read_text()

    return re.sub(r'^#include "(\w+\.h)"\n', text, source, flags=re.MULTILINE)


def anonymous(text: str, name: str, buffers: tuple[str, ...], comment: str = "//") -> str:
    """The text with names replaced by positions, and without comments: what makes two kernels the same code."""
    table = {name: "K", **{b: f"B{k}" for k, b in enumerate(dict.fromkeys(buffers))}}
    table |= {r: f"R{k}" for k, r in enumerate(dict.fromkeys(re.findall(r"\breg_\w+", text)))}
    text = re.sub(comment + r"[^\n]*\n", "", text)
    return re.sub(r"\w+", lambda m: table.get(m.group(), m.group()), text)
