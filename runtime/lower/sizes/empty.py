"""Sizes from data that may be 0: may a nest read, or update, a buffer of such a size?

What is read at coordinates that loops over that size make is not read where there are no elements. Anything else (a position from data, the first
element) would be read from no memory at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ...ir.facts import in_range
from ...ir.index import ZERO, Expr, Sym, Val, Var, expr, proves_less
from ...ir.nodes import Nest, Node, Size


def reads_nothing(nest: Nest, shapes: Mapping[str, Sequence[Size]], may_be_zero: Collection[str]) -> str | None:
    """A buffer that the nest may read, or update, although it has no elements; None where there is none. `shapes`: of buffers, `may_be_zero`:
    names of symbols.
    """
    loops = (*nest.loop_vars, *nest.rvars)
    roots = [nest.body]
    if (scatter := nest.scatter) is not None:
        loops = scatter.domain
        roots += [] if scatter.mask is None else [scatter.mask]
        roots += [a.node for e in scatter.index for a in e.atoms() if isinstance(a, Val)]
        shape = shapes.get(scatter.base, ())
        if not all(_safe(e, n, loops, may_be_zero) for e, n in zip(scatter.index, shape, strict=False)):
            return scatter.base
    for ld in _loads(roots):
        shape = shapes.get(ld.attr.buffer, ())
        for e, n in zip(ld.attr.index, shape, strict=False):
            guarded = bool(ld.args) and not any(isinstance(a, Val) for a in e.atoms())
            if not guarded and not _safe(e, n, loops, may_be_zero):
                name: str = ld.attr.buffer
                return name
    return None


def _loads(roots: Iterable[Node]) -> Iterable[Node]:
    seen: set[Node] = set()
    for root in roots:
        for n in root.walk(seen.__contains__):
            seen.add(n)
            if n.op == "load":
                yield n


def _safe(e: Expr, n: Size, loops: Sequence[Var], may_be_zero: Collection[str]) -> bool:
    """Whether the coordinate is within a dimension of size `n`, or no loop runs where that is 0."""
    if isinstance(n, int):
        return True
    mine = {a for a in n.atoms() if isinstance(a, Sym) and a.name in may_be_zero}
    from_data = any(
        isinstance(a, Val) for a in e.atoms()
    )  # of no elements none is in range, which its check does not say
    if not mine or proves_less(ZERO, n) or (not from_data and in_range(e, n)):
        return True
    extents = [expr(v.extent) for v in loops]
    if any(x % n == 0 for x in extents):
        return True
    if len(n.terms) != 1:
        return False
    factors = {a for x in extents if len(x.terms) == 1 for a in x.terms[0][0]}
    return mine <= factors and mine <= set(n.terms[0][0])


__all__ = ["reads_nothing"]
