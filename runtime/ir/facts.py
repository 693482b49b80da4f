"""Facts about index expressions that a checker needs: is an index in range, do indices cover a shape once, are two expressions equal.

All answers are proofs: True means true for every point of the loops. Where algebra does not decide, a small loop is enumerated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product as points_of

from .index import (
    Atom,
    Expr,
    Quotient,
    Sym,
    Val,
    Var,
    bounds,
    expr,
    of,
    product,
    proves_less,
    proves_nonnegative,
    recombine,
)
from .nodes import Size, contiguous_strides

LIMIT = 20_000  # points enumerated at most


def variables(expressions: Iterable[Expr]) -> tuple[Var, ...]:
    """The loop variables that occur (also inside quotients), by text."""
    found: set[Var] = set()
    for e in expressions:
        for a in e.atoms():
            if isinstance(a, Var):
                found.add(a)
            elif isinstance(a, Val):
                found |= a.node.vars()
    return tuple(sorted(found, key=lambda v: v.text))


def evaluate(e: Expr, values: Mapping[Atom, int]) -> int:
    """The number that `e` is where each atom has the value in `values`. Raises KeyError for an atom without one."""
    total = 0
    for monomial, c in e.terms:
        for a in monomial:
            if isinstance(a, Quotient):
                num, den = evaluate(a.num, values), evaluate(a.den, values)
                c *= num // den if a.kind == "//" else num % den
            else:
                c *= values[a]
        total += c
    return total


def points(loops: Sequence[Var]) -> Iterable[dict[Atom, int]] | None:
    """Every point of the loops, row-major, if there are few and their number is known."""
    total = 1
    for v in loops:
        if not isinstance(v.extent, int):
            return None
        total *= v.extent
    if total > LIMIT:
        return None
    ranges = [range(v.extent) for v in loops]  # type: ignore[arg-type]
    return (dict(zip(loops, p, strict=True)) for p in points_of(*ranges))


def equal(a: Expr, b: Expr) -> bool:
    """True if a = b at every point of the loops."""
    if a is b:
        return True
    gap = recombine(a - b)
    if not gap.terms or not _without_remainders(a - b).terms:
        return True
    if gap.is_const or any(isinstance(x, (Sym, Val)) for x in gap.atoms()):
        return False
    loops = points(variables([gap]))
    return loops is not None and all(evaluate(gap, p) == 0 for p in loops)


def _without_remainders(e: Expr) -> Expr:
    """Each x % d as x - d*(x // d), so that products of such cancel that `recombine` cannot put together."""
    remainders = {a for monomial, _ in e.terms for a in monomial if isinstance(a, Quotient) and a.kind == "%"}
    return e.subst({a: a.num - a.den * (a.num // a.den) for a in remainders}) if remainders else e


def in_range(e: Expr, n: Size) -> bool:
    """True if 0 <= e < n at every point of the loops (a `Val` is trusted to keep its promise)."""
    if proves_nonnegative(e) and proves_less(e, expr(n)):
        return True
    if any(v.extent == 0 for v in variables([e])):
        return True
    tidy = recombine(e)
    if tidy is not e:
        return in_range(tidy, n)
    if (free := _unchecked(e)) is not e:
        return in_range(free, n)
    if not isinstance(n, int) or any(isinstance(x, (Sym, Val)) for x in e.atoms()):
        return False
    loops = points(variables([e]))
    return loops is not None and all(0 <= evaluate(e, p) < n for p in loops)


def _unchecked(e: Expr) -> Expr:
    """The expression with a variable of extent n for each position that a check keeps in 0..n-1 when the program runs."""
    checked = [a for a in e.atoms() if isinstance(a, Val) and a.node.op == "bounded"]
    return e.subst({a: of(Var(a.text, a.node.args[1].attr)) for a in checked})


def plausible(e: Expr, n: Size) -> bool:
    """For a size known only at run time: is the index in range for the sizes seen while tracing (the facts behind it are guards)?"""
    atom = e.atom
    if isinstance(atom, Val) and atom.lo == 0 and atom.hi is None and not expr(n).is_const:
        return True  # an indirect index into a dimension of unknown size: the promise that comes with it has no number to state
    e = _unchecked(e)
    hints: dict[Atom, int | Expr] = {}
    for source in (e, expr(n)):
        for a in source.atoms():
            if isinstance(a, Sym) and a.hint is not None:
                hints[a] = a.hint
            for s in expr(a.extent).atoms() if isinstance(a, Var) else ():
                if isinstance(s, Sym) and s.hint is not None:
                    hints[s] = s.hint
    if not hints:
        return False
    sizes: dict[Atom, int | Expr] = {
        v: of(Var(v.name, extent))
        for v in variables([e])
        if not isinstance(v.extent, int)
        for extent in [_known(v.extent, hints)]
        if extent
    }
    known = e.subst({**hints, **sizes})
    top = expr(n).subst(hints)
    return top.is_const and in_range(known, int(top))


def plausibly_equal(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether two shapes are equal, or were while tracing where sizes are known only at run time (the facts behind it are guards)."""
    return len(a) == len(b) and all(map(_plausibly_equal, a, b))


def _plausibly_equal(a: Size, b: Size) -> bool:
    if a == b or (isinstance(a, int) and isinstance(b, int)):
        return a == b
    seen = [
        _known(expr(n), {s: s.hint for s in expr(n).atoms() if isinstance(s, Sym) and s.hint is not None})
        for n in (a, b)
    ]
    return seen[0] is not None and seen[0] == seen[1]


def _known(extent: Expr, hints: Mapping[Atom, int | Expr]) -> int | None:
    value = extent.subst(hints)
    return int(value) if value.is_const else None


def is_packed(shape: Sequence[Size], strides: Sequence[Size]) -> bool:
    """True if the strides are those of a contiguous layout, its dimensions in any order: no gaps, no repetition."""
    left = [(s, n) for s, n in zip(strides, shape, strict=True) if n != 1]
    step: Size = 1
    while left and 0 not in shape:
        found = next((p for p in left if p[0] == step), None)
        if found is None:
            return False
        left.remove(found)
        step = step * found[1]
    return True


def flat(index: Sequence[Expr], strides: Sequence[Size], offset: Size = 0) -> Expr:
    """Position in elements, with divisions recombined."""
    total = expr(offset)
    for e, s in zip(index, strides, strict=True):
        total = total + e * s
    return recombine(total)


def is_injective(position: Expr, loops: Sequence[Var]) -> bool:
    """True if two different points of the loops never have the same position: mixed-radix with gaps allowed, or enumerated."""
    live = [v for v in loops if v.extent != 1]
    if any(v.extent == 0 for v in live):
        return True
    if any(isinstance(a, Val) for a in position.atoms()):
        return False
    steps: list[tuple[Expr, Var]] = []
    for v in live:
        c = position.coefficient(v)
        if c is None or not c.terms:
            steps = []
            break
        steps.append((-c if all(k < 0 for _, k in c.terms) else c, v))
    while steps:
        # The variable with the largest step must step over everything that the others reach together.
        top = next((i for i, (c, v) in enumerate(steps) if _steps_over(c, steps[:i] + steps[i + 1 :])), None)
        if top is None:
            break
        steps.pop(top)
        if not steps:
            return True
    if not live:
        return True
    every = points(live)
    if every is None or any(isinstance(a, Sym) for a in position.atoms()):
        return False
    values = [evaluate(position, p) for p in every]
    return len(set(values)) == len(values)


def _steps_over(step: Expr, others: list[tuple[Expr, Var]]) -> bool:
    reach = expr(0)
    for c, v in others:
        reach = reach + c * (expr(v.extent) - 1)
    gap = step - reach
    lo = bounds(gap)[0]
    return (lo is not None and lo > 0) or positive_for_sizes(gap)


def positive_for_sizes(gap: Expr) -> bool:
    """gap > 0 if every size symbol is at least 1 (else the loop over it does not run)."""
    shifted = gap.subst({a: of(a) + 1 for a in gap.atoms() if isinstance(a, Sym)})
    lo = bounds(shifted)[0]
    return lo is not None and lo > 0


def covers(index: Sequence[Expr], shape: Sequence[Size], loops: Sequence[Var]) -> bool:
    """True if the loops visit every element of `shape` exactly once."""
    if any(n == 0 for n in shape):
        return True
    if any(isinstance(a, Val) for e in index for a in e.atoms()):
        return False
    index, shape, loops = _without_whole(index, shape, loops)
    if expr(product(v.extent for v in loops)) != expr(product(shape)):
        return False
    if not all(in_range(e, n) for e, n in zip(index, shape, strict=True)):
        return False
    return is_injective(flat(index, contiguous_strides(tuple(shape))), loops)


def _without_whole(
    index: Sequence[Expr], shape: Sequence[Size], loops: Sequence[Var]
) -> tuple[list[Expr], list[Size], list[Var]]:
    """What is left to prove without the dimensions that a loop of their own goes through whole: a position `-(-s // 8)*i + j` says less than
    the coordinates i and j, since nothing is known there of the size in front of i.
    """
    inside = [{a for a in e.atoms() if isinstance(a, Var)} for e in index]
    whole = {
        k: v
        for k, (e, n) in enumerate(zip(index, shape, strict=True))
        if (v := e.var) is not None
        and v in loops
        and expr(v.extent) == expr(n)
        and sum(v in mine for mine in inside) == 1
    }
    rest = [k for k in range(len(index)) if k not in whole]
    own = set(whole.values())
    return [index[k] for k in rest], [shape[k] for k in rest], [v for v in loops if v not in own]
