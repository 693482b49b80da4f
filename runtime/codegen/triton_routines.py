"""Calls of routines as Triton kernels: for each such step of a plan one that finds the rows of its programs, and runs the routine on them."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import UnsupportedError
from ..ir.index import Expr, product
from ..ir.nodes import Buffer, Size
from ..ir.quote import comment_text
from .python_text import number
from .routines import Routine
from .triton_blocks import Blocks

ELEMENTS = 1024  # of a block: eight for each thread of four warps
ACROSS = 16  # rows of a block at least, where those are neighbours in memory
MOST_ACROSS = 4 * ELEMENTS  # of a block that has them
LEAST = 2  # elements of a row that Triton can sort
PROGRAMS = 512  # that there should be, if there are rows enough: a few for each multiprocessor of a large GPU
WIDE = 2048  # elements of a block, from which on it has eight warps


def rows_of(routine: Routine) -> tuple[Size, ...]:
    """The sizes beside the dimension that the routine goes along: its first number."""
    return _without(routine.inputs[0].shape, routine)


def routine_blocks(routine: Routine) -> Blocks:
    """Rows of a block, places for the elements of each, and warps."""
    along = int(routine.inputs[0].shape[_dim(routine)])
    places = max(LEAST, 1 << (along - 1).bit_length())
    fewest = min(ACROSS, max(1, MOST_ACROSS // places)) if _is_across(routine) else 1
    rows = max(fewest, ELEMENTS // places)
    total = product(rows_of(routine))
    while rows > fewest and isinstance(total, int) and rows * PROGRAMS > total:
        rows //= 2
    elements = rows * places
    return rows, places, 8 if elements >= WIDE else 4 if elements >= 128 else 1


def _is_across(routine: Routine) -> bool:
    """Whether neighbours in memory are in neighbouring rows."""
    strides = _without(routine.inputs[0].stride, routine)
    return bool(strides) and strides[-1] == 1 and routine.inputs[0].stride[_dim(routine)] != 1


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
        steps = _without(view.stride, routine)
        parts = [f"i{k} * {_factor(s)}" for k, s in enumerate(steps)] or ["x * 0"]
        parts += [number(view.offset)] if view.offset != 0 else []
        lines.append(f"{address}_rows = {address} + {' + '.join(parts)}")
        given += [f"{address}_rows", number(view.stride[_dim(routine)])]
    along = number(routine.inputs[0].shape[_dim(routine)])
    for n in routine.numbers[1:]:
        if isinstance(n, Expr) and not n.is_const:
            raise UnsupportedError(f"the routine {routine.function} needs numbers that are known")
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


def _dim(routine: Routine) -> int:
    return int(routine.numbers[0])


def _without(of: tuple[Size, ...], routine: Routine) -> tuple[Size, ...]:
    return tuple(n for k, n in enumerate(of) if k != _dim(routine))


def _factor(n: Size) -> str:
    return number(n) if isinstance(n, int) else f"({number(n)})"


__all__ = ["render_routine", "routine_blocks", "rows_of"]
