"""PTX that its assembler takes as it is meant.

For devices of capability 9.0 LLVM adds two numbers of 16 bits at once, in the halves of one of 32. Where only one half of the sum is read and an
operand is a constant, ptxas (12.8 and 12.9, which Triton 3.6 to 3.8 bring; triton-lang/triton#11581, pytorch/pytorch#193183) encodes the constant
as 0: `x + 36` is `x`. Triton's index computations of short loops end in such sums, and the kernel then reads other elements. Two additions of 16
bits are assembled as they are meant.
"""

from __future__ import annotations

import re

_PACKED = re.compile(r"^(\s*)add\.([su])16x2\s+(%r\d+), (%r\d+), (%r\d+);", re.MULTILINE)
_APART = (
    r"\1{ .reg .b16 %low<3>, %high<3>; mov.b32 {%low1, %high1}, \4; mov.b32 {%low2, %high2}, \5; "
    r"add.\g<2>16 %low0, %low1, %low2; add.\g<2>16 %high0, %high1, %high2; mov.b32 \3, {%low0, %high0}; }"
)


def with_halves_added_apart(ptx: str) -> str:
    """The same module with an addition for each half, `ptx` as LLVM prints it: an instruction a line."""
    return _PACKED.sub(_APART, ptx)


__all__ = ["with_halves_added_apart"]
