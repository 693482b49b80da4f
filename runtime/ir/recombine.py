"""Quotients and remainders of one division, put together again."""

from __future__ import annotations

from .expr import Expr, Quotient, of


def recombine(e: Expr) -> Expr:
    """Put quotients and remainders of one division together: d*(x // d) + x % d becomes x, and x - d*(x // d) becomes x % d."""
    quotients = _quotients(e)
    if not quotients:
        return e
    for monomial, c in e.terms:
        for a in monomial:
            if isinstance(a, Quotient):
                rest = list(monomial)
                rest.remove(a)
                if a.kind == "%":
                    shorter = e + Expr(((tuple(rest), c),)) * (a.num - a.den * (a.num // a.den) - of(a))
                elif a.den.is_const and c % int(a.den) == 0:
                    part = Expr(((tuple(rest), -c // int(a.den)),))
                    shorter = e + part * (of(Quotient("%", a.num, a.den)) - a.num + a.den * of(a))
                else:
                    continue
                left = _quotients(shorter)
                if left < quotients or (left == quotients and len(shorter.terms) < len(e.terms)):
                    return recombine(shorter)
    return e


def _quotients(e: Expr) -> int:
    """How many quotients and remainders are factors of its terms."""
    return sum(isinstance(a, Quotient) for monomial, _ in e.terms for a in monomial)
