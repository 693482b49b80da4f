"""The blocks of a program that goes through many (`tile/idle.py`)."""

from __future__ import annotations


def strided_blocks(lines: list[str], points: str, program: str, column: str) -> list[str]:
    """The lines for each block of a program, below a condition: of n programs the first takes the blocks 0, n, 2 n and so on."""
    return [
        f"    for block in range({program}, tl.cdiv({points}, XBLOCK), tl.num_programs(0)):",
        f"        xindex = block * XBLOCK + tl.arange(0, XBLOCK){column}",
        f"        xmask = xindex < {points}",
        *(f"        {line}" for line in lines),
    ]
