"""Factors of an index that only sizes decide, so that a kernel computes each once and calls it by a name.

With symbolic sizes an index is a long sum: `floordiv(s1 - 1, 2) * s0 * o0 + s0 * o0 + …`. The C++ compiler reads all of it again at every
access. Sorted by loop variables, with a name for each sum of sizes, it is short: `factor1 * o0 + r1 + factor2`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import gcd

from ..ir.index import Atom, Expr, Monomial, Quotient, Sym, bounds, collect, proves_nonnegative


def by_loops(e: Expr, symbols: Collection[str]) -> list[tuple[Monomial, Expr]]:
    """The terms of an index, as products of loop variables with the sum of sizes that each is multiplied by; none where no such sum needs a name."""
    parts: dict[Monomial, list[tuple[Monomial, int]]] = {}
    for monomial, c in e.terms:
        sizes = tuple(a for a in monomial if is_size(a, symbols))
        parts.setdefault(tuple(a for a in monomial if a not in sizes), []).append((sizes, c))
    found = [(loops, Expr(collect(terms))) for loops, terms in parts.items()]
    found.sort(key=lambda part: not part[0])  # what no loop changes stands last
    return found if any(needs_name(factor) for _, factor in found) else []


def sum_text(e: Expr, atom: Callable[[Atom], str]) -> str:
    """A sum of products as C++, each atom as `atom` spells it."""
    out = ""
    for monomial, c in e.terms:
        factors = [atom(a) for a in monomial]
        if abs(c) != 1 or not factors:
            factors.append(f"{abs(c)}L" if abs(c) > 2**31 - 1 else str(abs(c)))
        sign = "-" if c < 0 else "+"
        out += f" {sign} {' * '.join(factors)}" if out else f"{'-' if c < 0 else ''}{' * '.join(factors)}"
    return out or "0"


def quotient_text(a: Quotient, text: Callable[[Expr], str]) -> str:
    """A quotient or remainder as C++, its parts as `text` spells them."""
    num, den = text(a.num), text(a.den)
    if proves_nonnegative(a.num):
        return f"(({num}) {'/' if a.kind == '//' else '%'} ({den}))"
    return f"{'floordiv' if a.kind == '//' else 'floormod'}<int64_t>({num}, {den})"


def size_text(e: Expr) -> str:
    """A sum of sizes as C++, without names for its parts."""

    def atom(a: Atom) -> str:
        return quotient_text(a, size_text) if isinstance(a, Quotient) else a.pretty

    return sum_text(e, atom)


def needs_name(factor: Expr) -> bool:
    """Whether a factor made of sizes is more than a product of symbols."""
    if factor.is_const:
        return False
    return len(factor.terms) > 1 or any(isinstance(a, Quotient) for a in factor.terms[0][0])


def without_common(factor: Expr) -> tuple[int, Expr]:
    """The integer that divides all terms, and what is left: multiples of one sum of sizes share its name."""
    times = gcd(*(c for _, c in factor.terms))
    return times, Expr(tuple((m, c // times) for m, c in factor.terms))


def is_size(a: object, symbols: Collection[str]) -> bool:
    """Whether a kernel may compute `a` before its loops: of its arguments alone, without a division by what may be 0."""
    if isinstance(a, Quotient):
        return (bounds(a.den)[0] or 0) > 0 and all(is_size(b, symbols) for b in a.num.atoms() | a.den.atoms())
    return isinstance(a, Sym) and a.name in symbols


__all__ = ["by_loops", "is_size", "needs_name", "quotient_text", "size_text", "sum_text", "without_common"]
