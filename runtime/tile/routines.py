"""How many rows each program of a Triton kernel has that calls a routine."""

from __future__ import annotations

from ...generated.tuning import RoutineSizes
from ..ir.index import product
from ..ir.nodes import Size
from ..kernels.routines import Routine
from .blocks import Blocks

LEAST = 2  # elements of a row that Triton can sort


def rows_of(routine: Routine) -> tuple[Size, ...]:
    """The sizes beside the dimension that the routine goes along: its first number."""
    return sizes_beside(routine.inputs[0].shape, routine)


def routine_blocks(routine: Routine, sizes: RoutineSizes) -> Blocks:
    """Rows of a block, places for the elements of each, and warps."""
    along = int(routine.inputs[0].shape[dim_of(routine)])
    places = max(LEAST, 1 << (along - 1).bit_length())
    fewest = min(sizes.across, max(1, sizes.most_across // places)) if _is_across(routine) else 1
    rows = max(fewest, sizes.elements // places)
    total = product(rows_of(routine))
    while rows > fewest and isinstance(total, int) and rows * sizes.programs > total:
        rows //= 2
    elements = rows * places
    return rows, places, 8 if elements >= sizes.wide else 4 if elements >= sizes.narrow else 1


def _is_across(routine: Routine) -> bool:
    """Whether neighbours in memory are in neighbouring rows."""
    strides = sizes_beside(routine.inputs[0].stride, routine)
    return bool(strides) and strides[-1] == 1 and routine.inputs[0].stride[dim_of(routine)] != 1


def dim_of(routine: Routine) -> int:
    return int(routine.numbers[0])


def sizes_beside(of: tuple[Size, ...], routine: Routine) -> tuple[Size, ...]:
    return tuple(n for k, n in enumerate(of) if k != dim_of(routine))


__all__ = ["dim_of", "routine_blocks", "rows_of", "sizes_beside"]
