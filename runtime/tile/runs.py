"""Which numbers count up by one along the last dimension of a block."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.index import Expr, Val, Var, of
from ..ir.nodes import contiguous_strides

RUN = 4  # random numbers that the generator makes at once, for neighbours


def runs(e: Expr, loops: Sequence[Var]) -> bool:
    """Whether neighbours number 4 k to 4 k + 3 of a block have the values 4 m to 4 m + 3 of `e`.

    loops  those along the dimension, of extents other than 1: digits of a position that counts up by one, from a multiple of 4 on.
    """
    if not loops or any(isinstance(a, Val) for a in e.atoms()):
        return False
    last = loops[-1]
    # Either the four are in one run of the innermost loop, or the value is the position itself (and more that is equal for all).
    if isinstance(last.extent, int) and last.extent % RUN == 0:
        return e.coefficient(last) == 1 and _multiple(e - of(last))
    position = of(last) * 0
    for v, stride in zip(loops, contiguous_strides(tuple(v.extent for v in loops)), strict=True):
        position = position + of(v) * stride
    return not (rest := e - position).atoms() & set(loops) and _multiple(rest)


def _multiple(e: Expr) -> bool:
    return all(c % RUN == 0 for _, c in e.terms)


__all__ = ["RUN", "runs"]
