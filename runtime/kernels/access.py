"""Questions about where two accesses meet: do they go through the same points, along memory, within one point of the outer loops?"""

from __future__ import annotations

from ..ir.index import Expr, Var, bounds, expr, of, recombine
from ..ir.nodes import Node, Size, contiguous_strides


def within_point(place: Expr, e: Expr, outer: set[Var]) -> bool:
    """Whether what is read at `e` in a dimension is stored at `place` by the same outer point. Their parts along outer loops must be one; the
    inner parts of what is read must stay within those of what is stored.
    """
    if place == e or place.atoms().isdisjoint(outer):
        return True
    mine, theirs = place, e
    for v in outer:
        c = place.coefficient(v)
        if c is None or e.coefficient(v) != c:
            return False
        mine, theirs = mine - c * of(v), theirs - c * of(v)
    (least, most), (low, high) = bounds(mine), bounds(theirs)
    if least is None or most is None or low is None or high is None:
        return mine == theirs
    return least <= low and high <= most


def along(body: Node, inner: list[Var]) -> bool:
    """Whether all that is read along these loops lies along them in memory, as far as a contiguous layout tells."""
    loads = [ld for ld in body.loads() if not ld.vars().isdisjoint(inner)]
    return all(not ld.attr.index[-1].atoms().isdisjoint(inner) for ld in loads if ld.attr.index)


def same_loops(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> dict[Var, Var] | None:
    """The loop variables of one access by those of another that meets the same elements in the same way."""
    found: dict[Var, Var] = {}
    for x, y in zip(a, b, strict=False):
        v, g = x.var, y.var
        if v is None or g is None:
            if x.is_const and x == y:
                continue
            return None
        if v.extent != g.extent or found.setdefault(v, g) is not g:
            return None
    return found if len(set(found.values())) == len(found) and len(a) == len(b) else None


def in_order(body: Node, variables: list[Var]) -> bool:
    """Whether every load meets the variables in their own order."""
    place = {v: k for k, v in enumerate(variables)}
    for ld in body.loads():
        met = [
            k for e in ld.attr.index for k in sorted(place[a] for a in e.atoms() if isinstance(a, Var) and a in place)
        ]
        if met != sorted(met):
            return False
    return True


def flat_of(index: tuple[Expr, ...], shape: tuple[Size, ...]) -> Expr:
    """Row-major position."""
    total = expr(0)
    for e, s in zip(index, contiguous_strides(shape), strict=True):
        total = total + e * s
    return recombine(total)


def in_loop_order(index: tuple[Expr, ...], shape: tuple[Size, ...], loops: tuple[Var, ...]) -> bool:
    """Whether an access to something of this shape meets its elements one after the other, as the loops go."""
    order = flat_of(tuple(of(v) for v in loops), tuple(v.extent for v in loops))
    return not recombine(flat_of(index, shape) - order).terms
