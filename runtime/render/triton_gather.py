"""Loops over gathered rows: where a row lies is data, so several rows are on their way at a time, and sums have several accumulators."""

from __future__ import annotations

from collections.abc import Callable

from ..ir.nodes import FLOATS
from ..kernels.plan import Reduce
from ..machine import Gpu
from ..tile.launch import Launch

IN_TURN = 4  # accumulators of a sum: with one it would be less accurate than eager's


def accumulators(of: Launch, st: Reduce) -> list[str]:
    """Names of the accumulators of a loop's reduction: the tiles of a round go to them in turn, and they are combined at the end."""
    turns = IN_TURN if of.gathers and st.kind == "sum" and st.value.dtype in FLOATS else 1
    return [f"{st.name}_acc", *(f"{st.name}_acc{k}" for k in range(1, turns))]


def combined(names: list[str], mask: str, combine: Callable[[str], str]) -> list[str]:
    """Lines that combine a tile with the accumulator whose turn it is. An accumulator is updated from itself alone: Triton 3.6 miscompiles loops
    that assign one loop-carried variable to another with the same initial value.
    """
    lines = [f"{name} = tl.where({mask}, {combine(name)}, {name})" for name in names]
    if len(names) == 1:
        return lines
    whose = [f"{'elif' if k else 'if'} turn % {len(names)} == {k}:" for k in range(len(names))]
    return [text for head, line in zip(whose, lines, strict=True) for text in (head, f"    {line}")]


def round_of(gpu: Gpu) -> str:
    """The steps of a round."""
    return f"({gpu.budgets.in_flight} * RBLOCK)"


def rounds(gpu: Gpu, count: str, inside: list[str]) -> list[str]:
    """A loop over rounds of tiles, whose loads are in flight together; its lines are repeated for each tile."""
    return [
        f"for first in range(0, {count}, {round_of(gpu)}):",
        f"    for turn in tl.static_range({gpu.budgets.in_flight}):",
        "        roffset = first + turn * RBLOCK",
        *(f"        {line}" for line in inside),
    ]
