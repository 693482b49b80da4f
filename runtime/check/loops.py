"""Loops and places under the checker: two lists of loops read as one, and coordinates of elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations

from ..ir.facts import equal, flat, in_range, plausible
from ..ir.index import Atom, Expr, Var, expr, of
from ..ir.nodes import Size, contiguous_strides


def loop_matches(
    a: Sequence[Var], b: Sequence[Var], start: int = 0, ordered: bool = False
) -> Iterable[tuple[dict[Atom, int | Expr], dict[Atom, int | Expr]]]:
    """Ways to read two lists of loops as one: each variable as digits of common new variables `~0`, `~1`, …, from `start` on."""
    left = [v for v in a if v.extent != 1]
    right = [v for v in b if v.extent != 1]
    orders: Iterable[Sequence[Var]] = [left] if ordered or len(left) > 4 else permutations(left)
    for order in orders:
        found = _common_digits(order, right, start)
        if found is not None:
            yield found


def _common_digits(
    a: Sequence[Var], b: Sequence[Var], start: int
) -> tuple[dict[Atom, int | Expr], dict[Atom, int | Expr]] | None:
    """Split both lists, from the innermost loop, into digits that they share; None if their radices do not fit."""
    ra, rb = list(a), list(b)
    ma: dict[Atom, int | Expr] = dict.fromkeys(a, 0)
    mb: dict[Atom, int | Expr] = dict.fromkeys(b, 0)
    rest_a: Size = ra[-1].extent if ra else 1
    rest_b: Size = rb[-1].extent if rb else 1
    step_a: Size = 1
    step_b: Size = 1
    count = 0
    while ra and rb:
        if expr(rest_a) == expr(rest_b):
            digit = rest_a
        elif isinstance(rest_a, int) and isinstance(rest_b, int) and rest_a and rest_b:
            digit = min(rest_a, rest_b)
            if rest_a % digit or rest_b % digit:
                return None
        else:
            return None
        z = of(Var(f"~{start + count}", digit))
        count += 1
        ma[ra[-1]] = ma[ra[-1]] + z * step_a
        mb[rb[-1]] = mb[rb[-1]] + z * step_b
        rest_a, step_a = (1, step_a) if rest_a is digit else (rest_a // digit, step_a * digit)
        rest_b, step_b = (1, step_b) if rest_b is digit else (rest_b // digit, step_b * digit)
        if rest_a == 1:
            ra.pop()
            rest_a, step_a = (ra[-1].extent if ra else 1), 1
        if rest_b == 1:
            rb.pop()
            rest_b, step_b = (rb[-1].extent if rb else 1), 1
    return None if ra or rb else (ma, mb)


def invert(
    index: Sequence[Expr], shape: Sequence[Size], loops: Sequence[Var]
) -> tuple[tuple[Expr, ...], dict[Atom, int | Expr]] | None:
    """Coordinates of an element, and each loop variable as a function of them, if every loop is a digit of one coordinate."""
    coords = tuple(of(Var(f"@{k}", n)) for k, n in enumerate(shape))
    found: dict[Atom, int | Expr] = {}
    for e, c in zip(index, coords, strict=True):
        for v in loops:
            step = e.coefficient(v)
            if step is None:
                return None
            if step.terms:
                if v in found:
                    return None
                found[v] = (c // step) % v.extent if step != 1 or expr(v.extent) != _extent(c) else c
    if any(v not in found and v.extent != 1 for v in loops):
        return None
    for v in loops:
        found.setdefault(v, 0)
    if not all(equal(e.subst(found), c) for e, c in zip(index, coords, strict=True)):
        return None
    return coords, found


def _extent(c: Expr) -> Expr:
    return expr(1) if c.var is None else expr(c.var.extent)


# -- addresses ---------------------------------------------------------------------------------------------------------
def element(position: Expr, shape: Sequence[Size], strides: Sequence[Size], offset: Size) -> tuple[Expr, ...] | None:
    """Coordinates of the element at a storage position of a strided layout, if its dimensions nest in each other."""
    rest = position - offset
    live = [k for k, n in enumerate(shape) if n != 1]
    steps = {k: s for k, s in enumerate(strides) if isinstance(s, int)}
    if tuple(strides) != contiguous_strides(tuple(shape)):
        if any(k not in steps for k in live):
            return None
        live.sort(key=lambda k: -steps[k])
    found = [expr(0)] * len(shape)
    for k in live:
        # A stride of 0 shows one element many times: it has no coordinate of its own.
        if strides[k] == 0:
            return None
        found[k], rest = rest // strides[k], rest % strides[k]
    if not all(in_range(e, n) or plausible(e, n) for e, n in zip(found, shape, strict=True)):
        return None
    return tuple(found) if equal(flat(found, strides, offset), position) else None
