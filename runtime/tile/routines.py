"""How many rows each program of a Triton kernel has that calls a routine."""

from __future__ import annotations

from ..ir.index import product
from ..ir.nodes import Size
from ..kernels.routines import Routine
from .blocks import Blocks

ELEMENTS = 1024  # of a block: eight for each thread of four warps
ACROSS = 16  # rows of a block at least, where those are neighbours in memory
MOST_ACROSS = 4 * ELEMENTS  # of a block that has them
LEAST = 2  # elements of a row that Triton can sort
PROGRAMS = 512  # that there should be, if there are rows enough: a few for each multiprocessor of a large GPU
WIDE = 2048  # elements of a block, from which on it has eight warps


def rows_of(routine: Routine) -> tuple[Size, ...]:
    """The sizes beside the dimension that the routine goes along: its first number."""
    return sizes_beside(routine.inputs[0].shape, routine)


def routine_blocks(routine: Routine) -> Blocks:
    """Rows of a block, places for the elements of each, and warps."""
    along = int(routine.inputs[0].shape[dim_of(routine)])
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
    strides = sizes_beside(routine.inputs[0].stride, routine)
    return bool(strides) and strides[-1] == 1 and routine.inputs[0].stride[dim_of(routine)] != 1


def dim_of(routine: Routine) -> int:
    return int(routine.numbers[0])


def sizes_beside(of: tuple[Size, ...], routine: Routine) -> tuple[Size, ...]:
    return tuple(n for k, n in enumerate(of) if k != dim_of(routine))


__all__ = ["dim_of", "routine_blocks", "rows_of", "sizes_beside"]
