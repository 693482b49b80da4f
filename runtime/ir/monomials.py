"""Products of atoms (`Monomial`): their order, product and quotient, and the text of a sum of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .index import Expr, Monomial


def term_key(term: tuple[Monomial, int]) -> tuple[int, str]:
    monomial = term[0]
    return (1 if not monomial else 0, "*".join(a.text for a in monomial))


def whole(value: int) -> int:
    """An integer of any type. Raises TypeError for another number: a size takes part in that only as a value of the loops."""
    if value != int(value):
        raise TypeError(f"{value} is no integer, in an expression of sizes")
    return int(value)


def products(
    left: Iterable[tuple[Monomial, int]], right: Sequence[tuple[Monomial, int]]
) -> Iterator[tuple[Monomial, int]]:
    """The terms of a product of two sums."""
    return ((merge(m1, m2), c1 * c2) for m1, c1 in left for m2, c2 in right)


def collect(terms: Iterable[tuple[Monomial, int]]) -> tuple[tuple[Monomial, int], ...]:
    """The terms of a sum in order, each monomial once."""
    terms = tuple(terms)
    if len(terms) < 2:
        return terms if terms and terms[0][1] else ()
    total: dict[Monomial, int] = {}
    for m, c in terms:
        total[m] = total.get(m, 0) + c
    kept = [(m, c) for m, c in total.items() if c]
    if len(kept) > 1:
        kept.sort(key=term_key)
    return tuple(kept)


def merge(a: Monomial, b: Monomial) -> Monomial:
    if not a:
        return b
    if not b:
        return a
    return tuple(sorted(a + b, key=lambda x: x.text))


def divide_monomial(m: Monomial, by: Monomial) -> Monomial | None:
    rest = list(m)
    for a in by:
        if a not in rest:
            return None
        rest.remove(a)
    return tuple(rest)


def operand(e: Expr) -> str:
    return e.text if e.is_const or e.atom is not None else f"({e.text})"


def print_expr(e: Expr) -> str:
    if not e.terms:
        return "0"
    out = ""
    for monomial, c in e.terms:
        body = "*".join(a.pretty for a in monomial)
        if not monomial:
            piece = str(abs(c))
        elif abs(c) == 1:
            piece = body
        else:
            piece = f"{abs(c)}*{body}"
        sign = "-" if c < 0 else ("+" if out else "")
        out += f" {sign} {piece}" if out else f"{sign}{piece}"
    return out
