"""Calls of routines as Triton kernels: for each such step of a plan one that finds the rows of its programs, and runs the routine on them."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.index import product
from ..ir.nodes import Buffer, Size
from ..ir.python_text import number
from ..ir.quote import comment_text
from ..kernels.routines import Routine
from ..tile.routines import dim_of, rows_of, sizes_beside


def render_routine(routine: Routine, layouts: Mapping[str, Buffer], name: str) -> str:
    """A Triton module with one function: pointers to what is read, to what is written, size symbols, XBLOCK and RBLOCK."""
    rows = rows_of(routine)
    views = (*routine.inputs, *routine.results)
    taken = [f"a{k}" for k in range(len(views))]
    lines = [
        "x = tl.program_id(0).to(tl.int64) * XBLOCK + tl.arange(0, XBLOCK)",
        f"live = x < {number(product(rows))}",
    ]
    left = "x"
    for k in range(len(rows) - 1, 0, -1):
        lines += [f"i{k} = {left} % {_factor(rows[k])}", f"x{k} = {left} // {_factor(rows[k])}"]
        left = f"x{k}"
    lines += [f"i0 = {left}"] if rows else []
    given = []
    for address, view in zip(taken, views, strict=True):
        steps = sizes_beside(view.stride, routine)
        parts = [f"i{k} * {_factor(s)}" for k, s in enumerate(steps)] or ["x * 0"]
        parts += [number(view.offset)] if view.offset != 0 else []
        lines.append(f"{address}_rows = {address} + {' + '.join(parts)}")
        given += [f"{address}_rows", number(view.stride[dim_of(routine)])]
    along = number(routine.inputs[0].shape[dim_of(routine)])
    for n in routine.numbers[1:]:
        given.append(repr(n) if isinstance(n, (bool, float)) else str(int(n)))
    call = ", ".join([*given[: 2 * len(views)], "live", along, "RBLOCK", *given[2 * len(views) :]])
    head = [f"# {comment_text(routine.origin)}"] if routine.origin else []
    parameters = ", ".join([*taken, *routine.symbols, "XBLOCK: tl.constexpr", "RBLOCK: tl.constexpr"])
    text = [
        "import triton",
        "import triton.language as tl",
        "",
        f"import opforge.generated.kernels.triton_routine_{routine.file} as routine",
        "",
        "",
        *head,
        "@triton.jit",
        f"def {name}({parameters}):",
        *(f"    {line}" for line in [*lines, f"routine.{routine.function}({call})"]),
    ]
    return "\n".join(text) + "\n"


def _factor(n: Size) -> str:
    return number(n) if isinstance(n, int) else f"({number(n)})"


__all__ = ["render_routine"]
