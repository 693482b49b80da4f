"""The terms of an index expression: integers times products of atoms (`Monomial`), and sums of them in one order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence


class Atom:
    """What a monomial is made of. `text` is unique per atom and gives the stable order of terms; `pretty` is for readers."""

    __slots__ = ("__weakref__", "text")
    text: str

    @property
    def pretty(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.pretty


Monomial = tuple[Atom, ...]
Term = tuple[Monomial, int]
"""A product of atoms and its factor."""


def term_key(term: Term) -> tuple[int, str]:
    monomial = term[0]
    if len(monomial) == 1:
        return 0, monomial[0].text
    return (1 if not monomial else 0, "*".join([a.text for a in monomial]))


def whole(value: int) -> int:
    """An integer of any type. Raises TypeError for another number: a size takes part in that only as a value of the loops."""
    if value != int(value):
        raise TypeError(f"{value} is no integer, in an expression of sizes")
    return int(value)


def products(left: Iterable[Term], right: Sequence[Term]) -> Iterator[Term]:
    """The terms of a product of two sums."""
    return ((merge(m1, m2), c1 * c2) for m1, c1 in left for m2, c2 in right)


def collect(terms: Iterable[Term]) -> tuple[Term, ...]:
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


def plus(left: tuple[Term, ...], right: tuple[Term, ...]) -> tuple[Term, ...]:
    """As `collect(left + right)`, of two sums that are in order: a single term is put in its place."""
    if len(left) < len(right):
        left, right = right, left
    if len(right) != 1:
        return collect(left + right) if right else left
    monomial, c = right[0]
    for k, (m, d) in enumerate(left):
        if m == monomial:
            return left[:k] + (((m, c + d),) if c + d else ()) + left[k + 1 :]
    k = bisect_left(left, term_key(right[0]), key=term_key)
    return left[:k] + right + left[k:]


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


def terms_text(terms: Iterable[Term]) -> str:
    """A sum for readers: variables by name only."""
    out = ""
    for monomial, c in terms:
        body = "*".join(a.pretty for a in monomial)
        if not monomial:
            piece = str(abs(c))
        elif abs(c) == 1:
            piece = body
        else:
            piece = f"{abs(c)}*{body}"
        sign = "-" if c < 0 else ("+" if out else "")
        out += f" {sign} {piece}" if out else f"{sign}{piece}"
    return out or "0"
