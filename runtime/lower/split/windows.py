"""Reductions over small windows, written out: each value then reads its few elements one by one, out of the cache where another has brought
them, and may share a kernel with what is computed of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from itertools import product as points

from ....generated.scalars import REDUCTIONS
from ...ir.fold import fold
from ...ir.index import Expr, Var, product
from ...ir.nodes import Extern, Nest, Node, Program, identity_mapping, rebuild
from ...ir.work import is_pointwise
from ..language import scalar_ops

WINDOW = 16  # elements that are written out at most
LONG, DEEP = 64, 8  # operations of one point; nests that follow each other


def write_out_windows(program: Program) -> Program:
    """The program with such reductions as pointwise nests. Those that give positions stay."""
    made: dict[str, Nest] = {}
    items: list[Nest | Extern] = []
    for item in program.items:
        if isinstance(item, Nest):
            item = _written_out(item, made)
            if is_pointwise(item):
                made[item.name] = item
        items.append(item)
    return Program(program.inputs, items, program.outputs, program.mutations, program.symbols)


def _written_out(nest: Nest, made: Mapping[str, Nest]) -> Nest:
    if nest.reduce is None or (combine := REDUCTIONS[nest.reduce].combine) is None:
        return nest
    size = product(v.extent for v in nest.rvars)
    if not isinstance(size, int) or not 1 < size <= WINDOW:
        return nest
    body = _in_window(nest, made)
    if body is None:
        return nest
    maker = getattr(scalar_ops, str(combine))
    at = points(*(range(int(v.extent)) for v in nest.rvars))  # type: ignore[arg-type]
    values = [
        scalar_ops.to_dtype(rebuild(body, lambda _: None, dict(zip(nest.rvars, p, strict=True))), nest.dtype)
        for p in at
    ]
    whole = scalar_ops.started(REDUCTIONS[nest.reduce], reduce(maker, values))
    return replace(nest, body=fold(whole), rvars=(), reduce=None)


def _in_window(nest: Nest, made: Mapping[str, Nest]) -> Node | None:
    """The body over what is read in some dimension at places that lie beside or over those of the next value (`2 * i + r`): that, and what
    each point of a window is computed from, put in its place. None where it reads no windows.
    """
    outer, inner = set(nest.loop_vars), set(nest.rvars)

    def overlaps(body: Node) -> bool:
        return any(_is_window(e, outer, inner) for ld in body.loads() for e in ld.attr.index)

    def of_each_point(ld: Node) -> Node | None:
        one = made.get(ld.attr.buffer)
        if one is None or ld.args or not any(set(e.atoms()) & inner for e in ld.attr.index):
            return None
        return rebuild(one.body, lambda _: None, identity_mapping(one.vars, ld.attr.index))

    body = nest.body
    while not overlaps(body):
        wider = rebuild(body, of_each_point, {})
        if wider is body or len(list(wider.walk())) > LONG:
            return None
        body = wider
    # What else has one value for each point of a window is a view of what is stored, or arithmetic on coordinates.
    for _ in range(DEEP):
        wider = rebuild(body, lambda ld: None if overlaps(ld) else of_each_point(ld), {})
        if wider is body or len(list(wider.walk())) > LONG:
            break
        body = wider
    return body


def _is_window(e: Expr, outer: set[Var], inner: set[Var]) -> bool:
    """Whether a place moves along a window that lies among those of other points. (In `512 * r + i`, with i < 512, it does not: whole rows lie
    between the places of one sum.)
    """
    atoms = e.atoms()
    for i in outer.intersection(atoms):
        for r in inner.intersection(atoms):
            step, stride = e.coefficient(r), e.coefficient(i)
            if step is None or stride is None or not step.is_const or not stride.is_const:
                return True
            if not isinstance(i.extent, int) or abs(int(step)) < abs(int(stride)) * i.extent:
                return True
    return False


__all__ = ["write_out_windows"]
