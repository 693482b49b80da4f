"""Reductions over small windows, written out: each value then reads its few elements one by one, out of the cache where another has brought
them, and may share a kernel with what is computed of it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import product as points

from ...generated.scalars import REDUCTIONS
from ..ir.fold import fold
from ..ir.index import product
from ..ir.nodes import Nest, Program, rebuild
from . import scalar_ops

WINDOW = 16  # elements that are written out at most


def write_out_windows(program: Program) -> Program:
    """The program with such reductions as pointwise nests. Those that give positions stay."""
    items = [_written_out(i) if isinstance(i, Nest) and _is_window(i) else i for i in program.items]
    return Program(program.inputs, items, program.outputs, program.mutations, program.symbols)


def _is_window(nest: Nest) -> bool:
    """Whether it reduces few elements, in some dimension at places that lie beside or over those of the next value (`2 * i + r`)."""
    if nest.reduce is None or REDUCTIONS[nest.reduce].combine is None or nest.body.dtype != nest.dtype:
        return False
    size = product(v.extent for v in nest.rvars)
    if not isinstance(size, int) or not 1 < size <= WINDOW:
        return False
    outer, inner = set(nest.loop_vars), set(nest.rvars)
    places = [set(e.atoms()) for ld in nest.body.loads() for e in ld.attr.index]
    return any(p & outer and p & inner for p in places)


def _written_out(nest: Nest) -> Nest:
    assert nest.reduce is not None
    combine = getattr(scalar_ops, str(REDUCTIONS[nest.reduce].combine))
    at = points(*(range(int(v.extent)) for v in nest.rvars))  # type: ignore[arg-type]
    values = [rebuild(nest.body, lambda _: None, dict(zip(nest.rvars, p, strict=True))) for p in at]
    return replace(nest, body=fold(reduce(combine, values)), rvars=(), reduce=None)


__all__ = ["write_out_windows"]
