"""What the ranges of loop variables and sizes prove about index expressions: bounds, and which of two is less."""

from __future__ import annotations

from .expr import ONE, ZERO, Expr, Quotient, Sym, Val, Var, expr
from .monomials import Atom, Monomial
from .recombine import recombine


def bounds(e: Expr) -> tuple[int | None, int | None]:
    """Inclusive integer bounds; None where unknown."""
    if e._bounds is None:
        e._bounds = _find_bounds(e)
    return e._bounds


def _find_bounds(e: Expr) -> tuple[int | None, int | None]:
    lo: int | None = 0
    hi: int | None = 0
    for monomial, c in e.terms:
        mlo, mhi = _monomial_bounds(monomial)
        if c < 0:
            mlo, mhi = mhi, mlo
        lo = None if lo is None or mlo is None else lo + c * mlo
        hi = None if hi is None or mhi is None else hi + c * mhi
    return lo, hi


def _atom_bounds(a: Atom) -> tuple[int | None, int | None]:
    if isinstance(a, Var):
        if isinstance(a.extent, int):
            return 0, max(a.extent - 1, 0)
        top = bounds(a.extent)[1]
        return 0, None if top is None else max(top - 1, 0)
    if isinstance(a, Sym):
        return None if a.signed else 0, None
    if isinstance(a, Val):
        return a.lo, a.hi
    assert isinstance(a, Quotient)
    nlo, nhi = bounds(a.num)
    dlo, dhi = bounds(a.den)
    if a.kind == "%":
        return (0 if dlo is not None and dlo >= 0 else None), (None if dhi is None else dhi - 1)
    if a.den.is_const and int(a.den) > 0:
        d = int(a.den)
        return None if nlo is None else nlo // d, None if nhi is None else nhi // d
    if nlo is None or nlo < 0 or dlo is None or dlo < 0:
        return None, None
    blocks, rest = (ZERO, ONE) if a.num.var is None else divmod(expr(a.num.var.extent), a.den)
    return 0, max(int(blocks) - 1, 0) if blocks.is_const and not rest.terms else nhi


def _monomial_bounds(m: Monomial) -> tuple[int | None, int | None]:
    lo: int | None = 1
    hi: int | None = 1
    for a in m:
        alo, ahi = _atom_bounds(a)
        if alo is None or alo < 0 or lo is None:
            if len(m) == 1:
                return alo, ahi
            return None, None
        lo = lo * alo
        hi = None if hi is None or ahi is None else hi * ahi
    return lo, hi


# -- comparisons -------------------------------------------------------------------------------------------------------
def proves_less(a: Expr, b: Expr) -> bool:
    """True if a < b for all values of the variables (sound, not complete)."""
    gap = b - a
    lo = bounds(gap)[0]
    if lo is not None and lo > 0:
        return True
    if (below := _same_divisor(a, b)) is not None:
        return proves_less(*below)
    # Replace every variable by the end of its range that makes the gap smallest; symbols are >= 0 (and > 0 inside a running loop).
    worst = gap
    for atom in sorted((x for x in gap.atoms() if isinstance(x, Var)), key=lambda x: x.text):
        c = worst.coefficient(atom)
        if c is None or (not all(k < 0 for _, k in c.terms) and not all(k > 0 for _, k in c.terms)):
            return False
        worst = worst.subst({atom: expr(atom.extent) - 1 if all(k < 0 for _, k in c.terms) else ZERO})
    lo = bounds(recombine(worst))[0]
    return lo is not None and lo > 0


def _same_divisor(a: Expr, b: Expr) -> tuple[Expr, Expr] | None:
    """What must be less than what so that x // d < y // d: x + d - 1 and y, since then x + d <= y."""
    x, y = a.atom, b.atom
    if isinstance(x, Quotient) and isinstance(y, Quotient) and x.kind == y.kind == "//" and x.den is y.den:
        return (x.num + x.den - 1, y.num) if x.den.is_const and int(x.den) > 0 else None
    return None


def proves_nonnegative(e: Expr) -> bool:
    lo = bounds(e)[0]
    return (lo is not None and lo >= 0) or proves_less(expr(-1), e)
