"""Index-set splitting: a loop is cut where a comparison of its variable changes its value, so that each piece has no condition left.

This is how a concatenation writes straight into its slices, one piece for each operand, and how padding costs nothing inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from ..ir.fold import compare, compare_sizes, coordinate, fold
from ..ir.index import Expr, Sym, Val, Var, expr, of, proves_less, proves_nonnegative, size
from ..ir.nodes import Node, Size, walk_all
from ..kernels.plan import Reduce, Store
from .loops import FlatKernel, FlatPhase, FlatStatement, substitute

MAX_PIECES = 16  # of a kernel: so many times as long is its text


def split_kernel(fk: FlatKernel) -> list[FlatKernel]:
    """Kernels that do the same work one after the other, since points of outer loops are independent. Neighbouring loops of a piece are not coalesced
    yet (`coalesce`).
    """
    fk = fold_kernel(fk)
    if fk.kernel.serial:
        return [fk]
    pieces = [fk]
    for v in fk.outer:
        cuts = breakpoints(fk, v)
        if len(cuts) >= MAX_PIECES and len(pieces) == 1:
            if not isinstance(v.extent, int):
                if found := _parted(fk, v, cuts):
                    return found
                continue
            pieces = _halved(fk, v, cuts)
            continue
        if not cuts or (len(cuts) + 1) * len(pieces) > MAX_PIECES:
            continue
        edges = [0, *cuts, v.extent]
        pieces = [piece for p in pieces for piece in _cut(p, v, edges)]
    return pieces


def _halved(fk: FlatKernel, v: Var, cuts: list[Size]) -> list[FlatKernel]:
    """Many pieces, as long as they share little: a concatenation of hundreds then is as many short loops, not one long chain of choices."""
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


def _parted(fk: FlatKernel, v: Var, cuts: list[Size]) -> list[FlatKernel]:
    """`_halved` for cuts that are sums of sizes; none where the halves share too much. The order of the cuts decides the comparisons, so that sums
    are only put into the few indices that a piece keeps.
    """
    place = {c: k for k, c in enumerate(cuts)}
    known = {n: (place[cut], below) for n, cut, below in _flips(fk, v) if cut in place}

    def within(first: int, last: int) -> Callable[[Node], bool | None]:
        def decide(n: Node) -> bool | None:
            if n not in known:
                return compare(n)
            k, below = known[n]
            return below if last <= k else not below if first > k else None

        return decide

    def parts(part: FlatKernel, first: int, last: int) -> list[FlatKernel]:
        """Of the part of the loop from one piece to another."""
        if first == last:
            lo, hi = [0, *cuts][first], [*cuts, v.extent][first]
            return _cut(part, v, [lo, hi])
        middle = (first + last) // 2
        spans = (first, middle), (middle + 1, last)
        halves = [fold_kernel(part, within(*span)) for span in spans]
        if last - first >= MAX_PIECES and sum(map(_size, halves)) > 1.25 * _size(part) + 32:
            return []
        found = [parts(half, *span) for half, span in zip(halves, spans, strict=True)]
        return [piece for half in found for piece in half] if all(found) else []

    return parts(fk, 0, len(cuts))


def _size(fk: FlatKernel) -> int:
    """How many different values the kernel has."""
    return sum(1 for _ in walk_all(s.value for p in fk.phases for s in p.body))


def _cut(fk: FlatKernel, v: Var, edges: list[Size]) -> list[FlatKernel]:
    found = []
    decide = compare if isinstance(v.extent, int) else compare_sizes
    for k, (lo, hi) in enumerate(pairwise(edges)):
        part = Var(f"{v.name}p{k}", size(hi - lo))
        loops = () if part.extent == 1 else (part,)
        piece = replace(substitute(fk, {v: of(part) + lo}, {v: loops}), start=lo, part=part if loops else None)
        found.append(fold_kernel(piece, decide))
    return found


def fold_kernel(fk: FlatKernel, decide: Callable[[Node], bool | None] = compare) -> FlatKernel:
    memo: dict[Node, Node] = {}

    def one(s: FlatStatement) -> FlatStatement | None:
        mask = None if s.mask is None else fold(s.mask, memo, decide)
        if mask is not None and mask.op == "const":
            if not mask.attr and isinstance(s.source, Store):
                return None
            mask = None
        return replace(s, value=fold(s.value, memo, decide), mask=mask)

    phases = []
    for p in fk.phases:
        body = tuple(new for s in p.body if (new := one(s)) is not None)
        if body or any(isinstance(s.source, Reduce) for s in p.body):
            phases.append(FlatPhase(p.inner, body))
    return replace(fk, phases=tuple(phases))


def breakpoints(fk: FlatKernel, v: Var) -> list[Size]:
    """Values of `v` at which some comparison of a coordinate that moves with it by one flips, in order, each between 0 and its extent. A loop
    over a symbolic size has those that are sums of sizes, if their order can be proved, else none.
    """
    cuts = dict.fromkeys(cut for _, cut, _ in _flips(fk, v))
    if isinstance(v.extent, int):
        return list[Size](sorted(c for c in cuts if isinstance(c, int) and 0 < c < v.extent))
    return _in_order(list(cuts), v.extent)


def _flips(fk: FlatKernel, v: Var) -> Iterator[tuple[Node, Size, bool]]:
    """Comparisons that change their value at one place of a loop: the place, and the value before it."""
    values = [s.value for p in fk.phases for s in p.body]
    masks = [s.mask for p in fk.phases for s in p.body if s.mask is not None]
    for n in walk_all(values + masks):
        if n.op in ("lt", "le", "gt", "ge"):
            a, b = coordinate(n.args[0]), coordinate(n.args[1])
            gap = None if a is None or b is None else a - b
            if gap is not None and (cut := flip(gap, v, n.op)) is not None:
                yield n, cut, (n.op in ("lt", "le")) == (gap.coefficient(v) == 1)


def _in_order(cuts: list[Size], extent: Expr) -> list[Size]:
    """The cuts that lie inside a loop of a symbolic extent, in an order that holds for all sizes; none if that cannot be proved."""
    inside = [c for c in map(expr, cuts) if not proves_less(c, expr(1)) and not proves_nonnegative(c - extent)]
    inside.sort(key=_example)
    edges = [expr(0), *inside, extent]
    proved = all(proves_nonnegative(hi - lo) for lo, hi in pairwise(edges))
    return [size(c) for c in inside] if proved else []


def _example(e: Expr) -> int:
    """Its value for the sizes that the program was traced with."""
    return int(e.subst({a: a.hint or 2 for a in e.atoms() if isinstance(a, Sym)}))


def flip(gap: Expr, v: Var, op: str) -> Size | None:
    """Where `gap op 0` changes, for `gap = v + c` or `gap = -v + c`, in which `c` is a number made of sizes alone."""
    c = gap.coefficient(v)
    if c is None or not (c == 1 or c == -1):
        return None
    k = size(gap - of(v) * c)
    if isinstance(k, Expr) and any(isinstance(a, (Var, Val)) for a in k.atoms()):
        return None
    if c == 1:  # v + k < 0 flips at v = -k; v + k <= 0 at -k + 1
        return -k if op in ("lt", "ge") else -k + 1
    return k + 1 if op in ("lt", "ge") else k  # k - v < 0 flips at v = k + 1; <= 0 at k


__all__ = ["breakpoints", "flip", "fold_kernel", "split_kernel"]
