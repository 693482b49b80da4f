"""One C++ translation unit for all kernels of a plan; kernels of equal text are written once."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...generated.cpp_scalars import CPP
from ...generated.scalars import SCALARS
from ...generated.targets import CpuTarget
from ..ir.nodes import Size
from ..kernels.plan import Plan
from ..kernels.routines import routines_of
from ..kernels.structure import Structure, structure
from .cpp_kernel import render_kernel, render_moved
from .cpp_routines import cpp_routine
from .cpp_shared import REGISTER, Function, shared
from .cpp_tables import CppTables

KERNELS = Path(__file__).resolve().parents[2] / "generated" / "kernels"
_PRELUDE_NAME = "prelude.h"
PRELUDE = KERNELS / _PRELUDE_NAME


MANY = 16
"""Costly functions that one kernel may have inline. The time of a compiler grows faster than a function (300 sines: 30 s, with calls 3), and
calls are as fast: what they wait for is their arithmetic."""
COSTLY = 10  # additions: a function that costs less is short, and stays inline
_COSTLY = {m[0] for s in SCALARS.values() if s.cost >= COSTLY and (m := re.match(r"v_\w+", CPP[s.name]))}
_CALL = re.compile(rf"\b({'|'.join(sorted(_COSTLY, key=len, reverse=True))})\(")
_OUTLINED = re.compile(r"\bcall_(v_\w+)\(")
_OUTLINE = (
    "template <class... V> __attribute__((noinline)) static auto call_{name}(V... x) {{ return {name}(x...); }}\n"
)
WIDTH_CHECK = (
    "static_assert(VL == {lanes}, \"these kernels are written for vectors of {lanes} elements, and the compiler's flags make others: "
    "take flags that choose a processor out of the setting cxx_flags, change the setting target, "
    'or see whether the guard of the target in specs/targets is a macro that the compiler defines");\n'
)
"""Follows a unit: the compiler proves that the width which it compiles for is the one that the kernels are written for."""


@dataclass(frozen=True)
class Unit:
    """Source text, and for each kernel of the plan the C symbol that runs it (layers of a model share symbols). Calls say no number of
    programs, and each runs one kernel: `programs`, `groups` and `pointer_tables` are empty. `routines`: how many sizes each call of a routine takes.
    """

    source: str
    symbols: dict[str, str]
    arity: dict[str, int]
    programs: Mapping[str, Size] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pointer_tables: frozenset[str] = frozenset()
    routines: Mapping[str, int] = field(default_factory=dict)


def render_unit(plan: Plan, target: CpuTarget, *, threads: int, threshold: int) -> Unit:
    tables = CppTables()
    bodies: dict[str, str] = {}
    symbols: dict[str, str] = {}
    arity: dict[str, int] = {}
    functions: list[Function] = []
    alike: dict[Structure | None, str] = {}
    made: dict[Hashable, tuple[str, tuple[int, ...]]] = {}
    for kernel in plan.kernels():
        arity[kernel.name] = len(kernel.reads) + len(kernel.writes)
        same = structure(kernel, plan.layouts)
        if same in alike:
            symbols[kernel.name] = alike[same]
            continue
        if same is not None and same.key in made:
            function, starts = made[same.key]
            steps = [there - here for there, here in zip(same.starts, starts, strict=True)]
            functions.append(render_moved(kernel, plan.layouts, function, steps))
            symbols[kernel.name] = alike[same] = kernel.name
            continue
        own = render_kernel(kernel, plan.layouts, tables, target, threads=threads, threshold=threshold)
        text = "".join(f.text for f in own)
        known = bodies.setdefault(
            anonymous(text, kernel.name, (*kernel.reads, *kernel.writes, *(b.name for b in kernel.scratch))),
            kernel.name,
        )
        symbols[kernel.name] = known
        if same is not None:
            alike[same] = known
            made[same.key] = known, same.starts
        if known == kernel.name:
            functions += own
    texts = [_outlined(f.text) for f in shared(functions)]
    routines = routines_of(plan)
    sizes: dict[str, int] = {}
    for routine in routines:
        code = cpp_routine(routine, plan.layouts)
        symbols[routine.name] = routine.name
        arity[routine.name] = len(routine.reads) + len(routine.writes)
        sizes[routine.name] = len(code.sizes)
        texts.append(code.text)
    files = ["prelude", *sorted({f"routine_{routine.file}" for routine in routines})]
    head = "".join(f'#include "{name}.h"\n' for name in files) + "\n"
    calls = sorted({m[1] for text in texts for m in _OUTLINED.finditer(text)})
    head += "".join(_OUTLINE.format(name=name) for name in calls)
    return Unit(head + "\n".join(texts), symbols, arity, routines=sizes)


def _outlined(text: str) -> str:
    """The text of a function, with calls where it has many costly functions."""
    return _CALL.sub(r"call_\1(", text) if len(_CALL.findall(text)) > MANY else text


def with_includes(source: str, prelude: Path) -> str:
    """The source of a unit with what it includes in its place; `prelude` is the file that stands for the prelude."""

    def text(found: re.Match[str]) -> str:
        return (prelude if found[1] == _PRELUDE_NAME else KERNELS / found[1]).read_text(encoding="utf-8")

    return re.sub(r'^#include "(\w+\.h)"\n', text, source, flags=re.MULTILINE)


def anonymous(text: str, name: str, buffers: tuple[str, ...], comment: str = "//") -> str:
    """The text with names replaced by positions, and without comments: what makes two kernels the same code."""
    table = {name: "K", **{b: f"B{k}" for k, b in enumerate(dict.fromkeys(buffers))}}
    text = re.sub(comment + r"[^\n]*\n", "", text)
    table |= {r: f"R{k}" for k, r in enumerate(dict.fromkeys(re.findall(REGISTER, text)))}
    return re.sub(r"\w+", lambda m: table.get(m.group(), m.group()), text)
