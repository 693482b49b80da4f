"""Kernels in place that leave all they would store as it is where one value, the same for all points, says so: their programs look at it first.

Such a kernel has few programs, each of which goes through many blocks: to launch a million programs takes half as long as the work, even if
each of them ends at once.
"""

from __future__ import annotations


def strided_blocks(lines: list[str], points: str, program: str, column: str) -> list[str]:
    """The lines for each block of a program, below a condition: of n programs the first takes the blocks 0, n, 2 n and so on."""
    return [
        f"    for block in range({program}, tl.cdiv({points}, XBLOCK), tl.num_programs(0)):",
        f"        xindex = block * XBLOCK + tl.arange(0, XBLOCK){column}",
        f"        xmask = xindex < {points}",
        *(f"        {line}" for line in lines),
    ]
