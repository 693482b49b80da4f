"""Cut a loop where a comparison of its variable changes its value: each piece then has no condition left.

This is how a concatenation writes straight into its slices and padding costs nothing inside: one piece for each operand.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ..ir.fold import coordinate, fold
from ..ir.index import Expr, Var, of
from ..ir.nodes import Node, walk_all
from ..schedule.plan import Reduce, Store
from .loops import FlatKernel, FlatPhase, FlatStatement, collapse, substitute

MAX_PIECES = 16


def split(fk: FlatKernel) -> list[FlatKernel]:
    """Kernels that together do the same work, one after the other: what the points of outer loops compute is independent."""
    fk = fold_kernel(fk)
    if fk.kernel.serial:
        return [fk]
    pieces = [fk]
    for v in fk.outer:
        if not isinstance(v.extent, int):
            continue
        cuts = breakpoints(fk, v)
        if len(cuts) >= MAX_PIECES and len(pieces) == 1:
            pieces = _halved(fk, v, cuts)
            continue
        if not cuts or (len(cuts) + 1) * len(pieces) > MAX_PIECES:
            continue
        edges = [0, *cuts, v.extent]
        pieces = [piece for p in pieces for piece in _cut(p, v, edges)]
    return [collapse(p) for p in pieces] if len(pieces) > 1 else pieces


def _halved(fk: FlatKernel, v: Var, cuts: list[int]) -> list[FlatKernel]:
    """Many pieces, as long as they share little: a concatenation of hundreds then is as many short loops, not one long chain of choices."""
    assert isinstance(v.extent, int)
    if len(cuts) < MAX_PIECES:
        return _cut(fk, v, [0, *cuts, v.extent]) if cuts else [fk]
    halves = _cut(fk, v, [0, cuts[len(cuts) // 2], v.extent])
    if sum(map(_size, halves)) > 1.25 * _size(fk) + 32:
        return [fk]
    pieces: list[FlatKernel] = []
    for half in halves:
        part = next((u for u in half.outer if u not in fk.outer), None)
        pieces += [half] if part is None else _halved(half, part, breakpoints(half, part))
    return pieces


def _size(fk: FlatKernel) -> int:
    """How many different values the kernel has."""
    return sum(1 for _ in walk_all(s.value for p in fk.phases for s in p.body))


def _cut(fk: FlatKernel, v: Var, edges: list[int]) -> list[FlatKernel]:
    found = []
    for k, (lo, hi) in enumerate(pairwise(edges)):
        part = Var(f"{v.name}p{k}", hi - lo)
        loops = (part,) if hi - lo > 1 else ()
        found.append(fold_kernel(substitute(fk, {v: of(part) + lo}, {v: loops})))
    return found


def fold_kernel(fk: FlatKernel) -> FlatKernel:
    memo: dict[Node, Node] = {}

    def one(s: FlatStatement) -> FlatStatement | None:
        mask = None if s.mask is None else fold(s.mask, memo)
        if mask is not None and mask.op == "const":
            if not mask.attr and isinstance(s.source, Store):
                return None
            mask = None
        return replace(s, value=fold(s.value, memo), mask=mask)

    phases = []
    for p in fk.phases:
        body = tuple(new for s in p.body if (new := one(s)) is not None)
        if body or any(isinstance(s.source, Reduce) for s in p.body):
            phases.append(FlatPhase(p.inner, body))
    return FlatKernel(fk.kernel, fk.outer, tuple(phases))


def breakpoints(fk: FlatKernel, v: Var) -> list[int]:
    """Values of `v` at which some comparison of a coordinate that moves with it by one flips."""
    cuts: set[int] = set()
    assert isinstance(v.extent, int)
    values = [s.value for p in fk.phases for s in p.body]
    masks = [s.mask for p in fk.phases for s in p.body if s.mask is not None]
    for n in walk_all(values + masks):
        if n.op in ("lt", "le", "gt", "ge"):
            a, b = coordinate(n.args[0]), coordinate(n.args[1])
            if a is not None and b is not None:
                cut = flip(a - b, v, n.op)
                if cut is not None and 0 < cut < v.extent:
                    cuts.add(cut)
    return sorted(cuts)


def flip(gap: Expr, v: Var, op: str) -> int | None:
    """Where `gap op 0` changes, for `gap = v + c` or `gap = -v + c`."""
    c = gap.coefficient(v)
    rest = gap - of(v) * c if c is not None else None
    if c is None or rest is None or not rest.is_const or not (c == 1 or c == -1):
        return None
    k = int(rest)
    if c == 1:  # v + k < 0 flips at v = -k; v + k <= 0 at -k + 1
        return -k if op in ("lt", "ge") else -k + 1
    return k + 1 if op in ("lt", "ge") else k  # k - v < 0 flips at v = k + 1; <= 0 at k


__all__ = ["breakpoints", "flip", "fold_kernel", "split"]
