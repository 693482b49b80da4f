"""Sizes that are equal by a guard: of two expressions that tracing relies on being equal, a program has one.

A guard on one symbol is torch's own business: it replaces the symbol. What is left are guards that it cannot solve, `s0*s1 == s2*s3`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any, Protocol

import sympy

from ...ir.index import Expr, Monomial, Quotient, Sym, divide_monomial, expr, recombine
from ...ir.index import size as canonical
from ...ir.nodes import Size
from ...torch_compat import runtime_asserts
from .from_data import FromData, range_of

_UNHINTED = 1 << 10
"""What a symbol weighs that data brings: sizes of the arguments are taken instead, which are known sooner."""

Weight = tuple[int, tuple[int, ...]]


class Polynomials(Protocol):
    """What `Sizes` knows of a graph's sizes."""

    env: Any
    from_data: FromData
    symbols: dict[str, Expr]
    derived: set[str]

    @property
    def names(self) -> tuple[str, ...]:
        """As `Sizes.names`."""
        ...

    def polynomial(self, e: sympy.Expr) -> Size | None:
        """As `Sizes.polynomial`."""
        ...


class EqualSizes:
    """What expressions are replaced by, for the `sizes` of one graph.

    Every rule replaces an expression by a lighter one. A guard becomes a rule as soon as all its symbols are known: no expression with these
    symbols has been converted before.
    """

    def __init__(self, sizes: Polynomials) -> None:
        self.sizes = sizes
        self._pending: list[tuple[sympy.Expr, sympy.Expr]] | None = None
        self._known = 0
        self._wholes: dict[Expr, Size] = {}
        self._monomials: list[tuple[Monomial, Expr]] = []

    def reduced(self, n: Size) -> Size:
        """The expression that stands for all that are equal to `n`."""
        if isinstance(n, int):
            return n
        if len(self.sizes.symbols) != self._known:
            self._learn()
        if not self._wholes:
            return n
        while True:
            found = self._step(n)
            if found is None and (other := recombine(n)) is not n:
                found = self._step(other)
            if found is None:
                return n
            if isinstance(found, int):
                return found
            n = found

    def _step(self, n: Expr) -> Size | None:
        if (whole := self._wholes.get(n)) is not None:
            return whole
        for monomial, c in n.terms:
            for old, new in self._monomials:
                if (rest := divide_monomial(monomial, old)) is not None:
                    return canonical(n + Expr(((rest, c),)) * (new - Expr(((old, 1),))))
        return None

    def _learn(self) -> None:
        """Make rules of the guards whose symbols have all become known."""
        if self._pending is None:
            self._pending = list(_equalities(self.sizes.env))
        self._known = len(self.sizes.symbols)
        waiting = []
        for a, b in self._pending:
            sides = [n for n in (self.sizes.polynomial(a), self.sizes.polynomial(b)) if n is not None]
            if len(sides) < 2:
                waiting.append((a, b))
            else:
                left, right = map(expr, sides)
                self._note_elements(a, right)
                self._note_elements(b, left)
                self._add(left, right)
                self._add(*_without_common(left, right))
                self._add(*_without_common(recombine(left - right), expr(0)))
        self._pending = waiting

    def _add(self, a: Expr, b: Expr) -> None:
        a, b = expr(self.reduced(canonical(a))), expr(self.reduced(canonical(b)))
        if a is b:
            return
        light, heavy = sorted((a, b), key=self._weight)
        if self._is_given(heavy):
            light, heavy = heavy, light
        if self._is_given(heavy) or heavy.is_const:
            return
        self._wholes[heavy] = canonical(light)
        if len(heavy.terms) == 1 and heavy.terms[0][1] == 1 and not self._is_given(light):
            self._monomials.append((heavy.terms[0][0], light))

    def _note_elements(self, known: sympy.Expr, other: Expr) -> None:
        """A product that equals a number above 0 has no factor that is 0."""
        if len(other.terms) == 1 and range_of(self.sizes.env, known)[0] >= 1:
            factors = {a.name for a in other.terms[0][0] if isinstance(a, Sym)}
            self.sizes.from_data.may_be_zero.difference_update(factors)

    def _is_given(self, e: Expr) -> bool:
        """Whether it is a symbol that is read from an argument, so that it has to stand there."""
        atom = e.atom
        return isinstance(atom, Sym) and atom.name not in self.sizes.derived and not self._is_unhinted(atom)

    def _weight(self, e: Expr) -> tuple[Weight, ...]:
        """Its monomials', the heaviest first. Where two are as heavy, what is known sooner is lighter."""
        return tuple(sorted((self._weight_of(m) for m, _ in e.terms), reverse=True))

    def _weight_of(self, monomial: Monomial) -> Weight:
        order = {name: k for k, name in enumerate(self.sizes.names)}
        atoms = [a for atom in monomial for a in _symbols(atom)]
        total = sum(_UNHINTED if self._is_unhinted(a) else 1 for a in atoms) + sum(
            isinstance(a, Quotient) for a in monomial
        )
        return total, tuple(sorted((order[a.name] for a in atoms), reverse=True))

    def _is_unhinted(self, atom: Sym) -> bool:
        return atom.name in self.sizes.from_data.unhinted


def _without_common(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """Both sides of an equation without terms and factors that both have."""
    terms = (a - b).terms
    common = gcd(*(c for _, c in terms)) or 1
    sides = [expr(0), expr(0)]
    for monomial, c in terms:
        sides[c < 0] += Expr(((monomial, abs(c) // common),))
    return sides[0], sides[1]


def _symbols(atom: Any) -> Iterator[Sym]:
    """The symbols of an atom, as often as they occur."""
    if isinstance(atom, Sym):
        yield atom
    elif isinstance(atom, Quotient):
        for e in (atom.num, atom.den):
            for monomial, _ in e.terms:
                for a in monomial:
                    yield from _symbols(a)


def _equalities(env: Any) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
    """Pairs of expressions that guards and conditions of the program say are equal."""
    conditions = [*(g.expr for g in env.guards), *(e for e, _ in runtime_asserts(env))]
    while conditions:
        e = conditions.pop(0)
        if isinstance(e, sympy.And):
            conditions += e.args
        elif isinstance(e, sympy.Eq):
            a, b = env.replace(e.lhs), env.replace(e.rhs)
            if a != b and not (a.is_number and b.is_number):
                yield a, b


__all__ = ["EqualSizes"]
