"""A guarded load reads nothing where its condition does not hold, also of what a kernel keeps for itself (issue 35).

The gradient of the softmax of a slice is such a kernel: rows of 8 values in a scratch tile, spread over rows of 128 values. It read the tile's
rows 8 to 127, and a select dropped what it had read: right values, or a segmentation fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from opforge.runtime.ir.nodes import index_node
from opforge.runtime.lower.language import scalar_ops as s
from tests.support.loops import agree, run, softmax

SPREAD = 700  # columns of the result: what lies so far behind a tile is not the tile


def spread(b: Any, x: Any, first: int, condition: Callable[[Any, Any], Any] | None = None) -> Any:
    """The softmax of the rows at columns `first` and on of wider rows of zeros, where `condition` of row and column holds too."""
    y = softmax(b, x, 1)
    i = b.coords((x.shape[0], SPREAD))
    row, column = index_node(i[0]), index_node(i[1])
    inside = s.logical_and(s.ge(column, first), s.lt(column, first + x.shape[1]))
    if condition is not None:
        inside = s.logical_and(inside, condition(row, column))
    return b.define((x.shape[0], SPREAD), b.guarded(inside, b.at(y, [i[0], i[1] - first]), 0.0))


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "from the first column": lambda b, x: spread(b, x, 0),
    "from a later column": lambda b, x: spread(b, x, 500),
    "under a condition of each lane": lambda b, x: spread(b, x, 3, lambda row, column: s.lt(column, row)),
}


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Rows too short for the lanes to run along them: they run over the rows, and a tile holds a vector for each column."""
    return [torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows)).to(dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [256, 37])
@pytest.mark.parametrize("lanes", [1, 4, 8, 16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_in_scratch_are_spread_over_wider_rows(name: str, lanes: int, rows: int, dtype: torch.dtype) -> None:
    agree(run(PROGRAMS[name], inputs(rows, dtype), lanes=lanes))


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_scratch_is_read_under_the_condition(name: str, lanes: int) -> None:
    source = run(PROGRAMS[name], inputs(37), lanes=lanes).source
    spreading = source[source.rindex(f"< {SPREAD};") :]
    loads = [line for line in spreading.splitlines() if re.search(r"(loadu|load_where|gather)\(tile_", line)]
    assert len(loads) == 2, "one load in whole vectors, one in the last partial vector"
    for line in loads:
        assert re.search(r"\? loadu\(tile_|load_where\(tile_", line), line
    if name == "under a condition of each lane":
        assert "lane_mask(live) &" in loads[1], "lanes past the end read nothing"


UPDATES: dict[str, Callable[[Any, Any], Any]] = {
    "columns": lambda row, column: s.ge(column, 3),
    "a row's columns": lambda row, column: s.logical_and(s.ge(column, 3), s.gt(column, row)),
}


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("lanes", [1, 4, 8, 16])
@pytest.mark.parametrize("name", UPDATES)
def test_an_update_reads_old_values_under_its_condition(name: str, lanes: int, step: int) -> None:
    """The old value was read for whole vectors, before the first element too; and from neighbours where the new one goes to every second place."""

    def update(b: Any, x: Any, y: Any) -> Any:
        i = b.grid(y.shape, "i")
        condition = UPDATES[name](index_node(i[0]), index_node(i[1]))
        return b.scatter(x, i, b.at(y, i), [i[0], (i[1] - 3) * step], "sum", condition)

    x, y = torch.randn(5, 37 * step), torch.randn(5, 40)
    ran = run(update, [x, y], lanes=lanes)
    agree(ran)
    (kernel,) = ran.plan.kernels()
    assert f"loadu({kernel.writes[0]} + " not in ran.source
    if step == 1 and lanes > 1:
        assert f"load_where({kernel.writes[0]} + " in ran.source, "this is about vectors"
