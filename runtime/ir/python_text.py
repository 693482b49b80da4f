"""Sizes as Python source."""

from __future__ import annotations

from .index import Quotient, Sym
from .nodes import Size


def number(e: Size) -> str:
    """A size as Python source; size symbols are local variables."""
    if isinstance(e, int):
        return str(e)
    out = []
    for monomial, c in e.terms:
        factors = [_factor(a) for a in monomial]
        if c != 1 or not factors:
            factors.insert(0, str(c))
        out.append("*".join(factors))
    return " + ".join(out) or "0"


def _factor(a: object) -> str:
    if isinstance(a, Sym):
        return a.name
    assert isinstance(a, Quotient), a
    return f"(({number(a.num)}) {a.kind} ({number(a.den)}))"


def shape_text(shape: tuple[Size, ...]) -> str:
    return "(" + ", ".join(number(n) for n in shape) + ("," if len(shape) == 1 else "") + ")"


__all__ = ["number", "shape_text"]
