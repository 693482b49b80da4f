"""What conditions decide: the branch of a `where`, a load's mask, parts of a condition, where others are assumed to hold.

Used when the values of a plan are compared with those of its program (`check_values.py`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from functools import lru_cache
from math import inf
from types import MappingProxyType

from ..ir.facts import evaluate, points, variables
from ..ir.index import ZERO, Atom, Expr, Quotient, Sym, Val, Var, bounds, expr, of, proves_nonnegative, recombine, size
from ..ir.nodes import INTS, Node, const

AND = ("logical_and", "bitwise_and")
OR = ("logical_or", "bitwise_or")
NOT = ("logical_not", "bitwise_not")
COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")
Assumed = frozenset[Node]
"""Conditions that hold where an expression counts."""


def conjuncts(n: Node) -> Assumed:
    """The condition and the parts that hold with it."""
    if n.op in AND and n.dtype == "bool":
        return frozenset().union(*(conjuncts(a) for a in n.args)) | {n}
    return frozenset((n,))


_COMPLEMENT = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}


def opposite(n: Node, assumed: Assumed) -> Assumed:
    """What holds where the condition `n` does not (of integers: no NaN is among them)."""
    if n.op in _COMPLEMENT and all(a.dtype in INTS for a in n.args):
        return frozenset((Node(_COMPLEMENT[n.op], n.args, "bool"),))
    if n.op in AND and n.dtype == "bool" and len(n.args) == 2:
        for known, other in (n.args, n.args[::-1]):
            if truth(known, assumed):
                return opposite(other, assumed)
        return frozenset()
    if n.op in OR and n.dtype == "bool":
        return frozenset().union(*(opposite(a, assumed) for a in n.args))
    if n.op in NOT and n.dtype == "bool":
        return conjuncts(n.args[0])
    return frozenset()


def reduced(n: Node, assumed: Assumed) -> Node:
    """Drop what is decided here: branches of a known condition, masks that hold, parts of conditions."""
    while True:
        if n.op == "where" and len(n.args) == 3:
            known = truth(n.args[0], assumed)
            if known is None:
                return n
            n = n.args[1] if known else n.args[2]
        elif n.op == "load" and n.args:
            mask = condition(n.args[0], assumed)
            if mask.op == "const":
                if not mask.attr:
                    return const(0, n.dtype)
                n = Node("load", (), n.dtype, n.attr)
            elif mask is not n.args[0]:
                n = Node("load", (mask,), n.dtype, n.attr)
            return n
        elif n.dtype == "bool" and n.op not in ("const", "load"):
            return condition(n, assumed)
        else:
            return n


def truth(n: Node, assumed: Assumed) -> bool | None:
    """Whether the condition holds, or None where that is not decided."""
    n = condition(n, assumed)
    return bool(n.attr) if n.op == "const" else None


def condition(n: Node, assumed: Assumed) -> Node:
    """A condition with its decided parts removed."""
    if n in assumed:
        return const(True, "bool")
    if n.op in (*AND, *OR) and n.dtype == "bool" and len(n.args) == 2:
        stop = n.op in OR
        a, b = (condition(x, assumed) for x in n.args)
        for known, other in ((a, b), (b, a)):
            if known.op == "const":
                return const(stop, "bool") if bool(known.attr) is stop else other
        return n if (a, b) == n.args else Node(n.op, (a, b), "bool")
    if n.op in NOT and n.dtype == "bool":
        a = condition(n.args[0], assumed)
        return const(not a.attr, "bool") if a.op == "const" else n
    if n.op in COMPARE and len(n.args) == 2:
        left, right = coordinate(n.args[0]), coordinate(n.args[1])
        if left is not None and right is not None:
            decided = decide(n.op, *bounds(left - right))
            if decided is None and (less := narrowed(assumed)):
                decided = decide(n.op, *bounds((left - right).subst(less)))
            if decided is None and (ends := extremes(left - right, assumed)) is not None:
                decided = decide(n.op, *ends)
            if decided is not None:
                return const(decided, "bool")
    return n


def coordinate(n: Node) -> Expr | None:
    """The index expression that an integer node is, or None."""
    if n.op == "index":
        found: Expr = n.attr
        return found
    if n.op == "const" and n.dtype == "int64":
        return expr(int(n.attr))
    return coordinate(n.args[0]) if n.op == "to_dtype" and n.dtype == "int64" else None


def decide(op: str, lo: int | None, hi: int | None) -> bool | None:
    """A comparison of a and b where a - b lies in lo..hi."""
    below, above = hi is not None and hi < 0, lo is not None and lo > 0
    never_above, never_below = hi is not None and hi <= 0, lo is not None and lo >= 0
    yes = {"lt": below, "le": never_above, "gt": above, "ge": never_below, "ne": below or above, "eq": lo == hi == 0}[
        op
    ]
    no = {"lt": never_below, "le": above, "gt": never_above, "ge": below, "ne": lo == hi == 0, "eq": below or above}[op]
    return True if yes else False if no else None


@lru_cache(maxsize=256)
def narrowed(assumed: Assumed) -> Mapping[Atom, Expr]:
    """Loop variables by ones that take only the values they can have where these conditions hold: `6*i + j < 3` leaves 0 for `i` and three
    values for `j`; `i > 0` leaves one less, also where the number of values is a symbol. A position that data brings, by the one that is left.
    """
    below = [d for n in assumed for d in _negative(n)]  # differences that are less than 0
    ranges: dict[Var | Val, tuple[int, float]] = {}
    for v in (v for _, terms in below for v, _ in terms):
        ranges[v] = _range(v)
    for _ in below:
        before = dict(ranges)
        for constant, terms in below:
            for v, c in terms:
                lo, hi = ranges[v]
                rest = constant + sum(min(d * ranges[u][0], d * ranges[u][1]) for u, d in terms if u is not v)
                if rest != -inf:  # c * v < -rest
                    ranges[v] = (lo, min(hi, (-rest - 1) // c)) if c > 0 else (max(lo, int(rest // -c + 1)), hi)
        if ranges == before:
            break
    found: dict[Atom, Expr] = {}
    for v, (lo, hi) in ranges.items():
        if isinstance(v, Val):
            if lo == hi:
                found[v] = expr(lo)
        elif lo <= hi < inf and hi - lo + 1 != v.extent:
            found[v] = expr(lo) if lo == hi else of(Var(f"{v.name}_in", int(hi) - lo + 1)) + lo
        elif lo > 0 and hi == inf:
            found[v] = of(Var(f"{v.name}_in", size(v.extent - lo))) + lo
    limits = sorted((found for n in assumed for found in _limits(n)), key=lambda p: (p[0].text, p[2].text))
    least = {loop: limit for loop, lower, limit in limits if lower}
    most = {loop: limit for loop, lower, limit in limits if not lower}
    for loop in {**most, **least}:
        first = least.get(loop, ZERO)
        found.setdefault(loop, of(Var(f"{loop.name}_in", size(most.get(loop, expr(loop.extent)) - first))) + first)
    return MappingProxyType(found)


def shrunk(e: Expr, assumed: Assumed) -> Expr:
    """Quotients and remainders of what these conditions keep below the divisor: `x // n` is 0 and `x % n` is `x` where `x < 2` and `n >= 2`."""
    below = [d for n in assumed if (d := _difference(n)) is not None]
    if not below:
        return e
    found: dict[Atom, int | Expr] = {}
    for q in (a for a in e.atoms() if isinstance(a, Quotient)):
        if any(proves_nonnegative(d - q.num + q.den) for d in below) and proves_nonnegative(q.num):
            found[q] = q.num if q.kind == "%" else 0
    return e.subst(found) if found else e


def slid(assumed: Assumed) -> Mapping[Atom, Expr]:
    """Loop variables by how far they are from others, where conditions bound that: `0 <= i - r < 2` leaves `r` plus one of two for `i`."""
    below: dict[tuple[tuple[Var | Val, int], ...], int] = {}
    for n in assumed:
        for constant, linear in _negative(n):
            key = tuple(sorted(linear, key=lambda t: t[0].text))
            below[key] = max(constant, below.get(key, constant))
    found: dict[Atom, Expr] = {}
    used: set[Var | Val] = set()
    for terms, constant in below.items():
        other = below.get(tuple((u, -c) for u, c in terms))  # other < the sum of the terms < -constant
        v = next((u for u, c in terms if c == 1 and isinstance(u, Var)), None)
        if len(terms) < 2 or other is None or v is None or not used.isdisjoint(u for u, _ in terms):
            continue
        if (count := -constant - other - 1) > 0:
            found[v] = of(Var(f"{v.name}_from", count)) + other + 1
            for u, c in terms:
                if u is not v:
                    found[v] = found[v] - of(u) * c
            used.update(u for u, _ in terms)
    return MappingProxyType(found)


def extremes(e: Expr, assumed: Assumed = frozenset()) -> tuple[int, int] | None:
    """The least and the largest value at those points of the loops where these conditions hold, by going through all of them; None where
    they are too many, or of unknown number, or none.
    """
    if not _counted(e):
        return None
    mine = set(variables([e]))
    tests = [d for d, read in _counted_differences(assumed) if not mine.isdisjoint(read)]
    if points(variables([e, *tests])) is None:
        tests = [d for d in tests if mine.issuperset(variables([d]))]
    return _extremes(e, frozenset(tests))


@lru_cache(maxsize=256)
def _counted_differences(assumed: Assumed) -> tuple[tuple[Expr, frozenset[Var]], ...]:
    """What is less than 0 where these conditions hold, as far as loop variables alone decide it, and those variables."""
    found = (_difference(n) for n in assumed)
    return tuple((d, frozenset(variables([d]))) for d in found if d is not None and _counted(d))


def _counted(e: Expr) -> bool:
    """Whether loop variables alone decide the value."""
    return not any(isinstance(a, (Sym, Val)) for a in e.atoms())


@lru_cache(maxsize=4096)
def _extremes(e: Expr, tests: frozenset[Expr]) -> tuple[int, int] | None:
    """Where all of `tests` are less than 0."""
    part, start = _apart(e)
    limits = [_apart(d) for d in tests]
    if all(found is part or found is -part for found, _ in limits):
        # They are limits of one expression, as many slices of one tensor make them: its values are found once for all.
        values = _values(part)
        first = bisect_left(values, max((k + 1 for found, k in limits if found is not part), default=-inf))
        end = bisect_right(values, min((-k - 1 for found, k in limits if found is part), default=inf))
        return (values[first] + start, values[end - 1] + start) if first < end else None
    every = points(variables([e, *tests])) or ()
    met = {evaluate(e, p) for p in every if all(evaluate(d, p) < 0 for d in tests)}
    return (min(met), max(met)) if met else None


@lru_cache(maxsize=256)
def _values(e: Expr) -> tuple[int, ...]:
    """The values at all points of the loops, ascending; none where these are too many."""
    return tuple(sorted({evaluate(e, p) for p in points(variables([e])) or ()}))


@lru_cache(maxsize=4096)
def _apart(e: Expr) -> tuple[Expr, int]:
    """An expression without its constant term, and that term."""
    constant = next((c for monomial, c in e.terms if not monomial), 0)
    return e - constant, constant


def _range(v: Var | Val) -> tuple[int, float]:
    if isinstance(v, Val):
        assert v.lo is not None
        return v.lo, inf if v.hi is None else v.hi
    return 0, v.extent - 1 if isinstance(v.extent, int) else inf


@lru_cache(maxsize=4096)
def _limits(n: Node) -> tuple[tuple[Var, bool, Expr], ...]:
    """A loop variable, and a size that is known only when the program runs, where the comparison says that the one is no less (True) or less
    (False) than the other.
    """
    d = _difference(n)
    loops = [a for a in d.atoms() if isinstance(a, (Var, Val))] if d is not None else []
    if d is None or len(loops) != 1 or not isinstance(v := loops[0], Var) or d.coefficient(v) not in (1, -1):
        return ()
    limit = of(v) - d if d.coefficient(v) == 1 else of(v) + d + 1
    return () if limit.is_const else ((v, d.coefficient(v) == -1, limit),)


@lru_cache(maxsize=4096)
def _negative(n: Node) -> tuple[tuple[int, tuple[tuple[Var | Val, int], ...]], ...]:
    """A comparison of coordinates as linear forms (constant, coefficients of loop variables and positions) that are less than 0. A size in
    a product is at least 1 where a loop of as many steps runs: without it the product is no larger.
    """
    d = _difference(n)
    if d is None:
        return ()
    sizes = {a for v in d.atoms() if isinstance(v, Var) for a in _factors(v.extent)}
    constant, terms = 0, dict[Var | Val, int]()
    for monomial, c in d.terms:
        rest = [a for a in monomial if c < 0 or a not in sizes]
        if not rest:
            constant += c
        elif len(rest) == 1 and (isinstance(v := rest[0], Var) or (isinstance(v, Val) and v.lo is not None)):
            terms[v] = terms.get(v, 0) + c
        else:
            return ()
    return ((constant, tuple(terms.items())),)


def _factors(extent: int | Expr) -> tuple[Atom, ...]:
    """Sizes that are positive where the extent is."""
    factors = expr(extent).terms[0][0] if len(expr(extent).terms) == 1 else ()
    return () if any(isinstance(a, Sym) and a.signed for a in factors) else factors


@lru_cache(maxsize=4096)
def _difference(n: Node) -> Expr | None:
    """What is less than 0 where the comparison of two coordinates holds."""
    if n.op not in ("lt", "le", "gt", "ge"):
        return None
    a, b = coordinate(n.args[0]), coordinate(n.args[1])
    if a is None or b is None:
        return None
    d = recombine(a - b if n.op in ("lt", "le") else b - a)
    return d - 1 if n.op in ("le", "ge") else d
