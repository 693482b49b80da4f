"""Floor division of index expressions, simplified by what their ranges prove. Importing this module gives `Expr` its `//` and `%`."""

from __future__ import annotations

from math import gcd

from .bounds import bounds, proves_less, proves_nonnegative
from .expr import ONE, ZERO, Expr, Quotient, Term, Val, Var, expr, of, total
from .monomials import divide_monomial
from .recombine import recombine


def divmod_(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """Floor quotient and remainder, simplified with the ranges of the variables."""
    if b == 1:
        return a, ZERO
    if a.is_const and b.is_const and int(b) != 0:
        return expr(int(a) // int(b)), expr(int(a) % int(b))
    if a is b:
        return ONE, ZERO
    a = recombine(a)
    # Split a = q * b + rest by the terms that b divides.
    q: list[Term] = []
    rest: list[Term] = []
    b_mono, b_coef = b.terms[0] if len(b.terms) == 1 else (None, 0)
    for monomial, c in a.terms:
        divided = divide_monomial(monomial, b_mono) if b_mono is not None else None
        if divided is not None and b_coef and c % b_coef == 0:
            q.append((divided, c // b_coef))
        elif divided is not None and not monomial and b_coef > 0 and abs(c) >= b_coef:
            q.append(((), c // b_coef))
            rest.append(((), c % b_coef))
        else:
            rest.append((monomial, c))
    quotient, remainder = total(q), total(rest)
    if not remainder.terms:
        return quotient, ZERO
    if proves_nonnegative(remainder) and proves_less(remainder, b):
        return quotient, remainder
    if proves_less(remainder, ZERO) and proves_nonnegative(remainder + b):
        return quotient - 1, remainder + b
    dq, dr = _reduce_quotient(remainder, b)
    return quotient + dq, dr


def _reduce_quotient(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """Quotient and remainder of an `a` no term of which b divides."""
    if isinstance(a.atom, Quotient) and a.atom.kind == "%" and a.atom.den is b and (bounds(b)[0] or 0) >= 0:
        return ZERO, a  # a remainder already (of a size, which no loop goes through where it is 0)
    if b.is_const:
        n = int(b)
        # a = g*A + s with 0 <= s < g and g | b: (g*A + s) // (g*B) = A // B.
        for g in sorted({gcd(c, n) for _, c in a.terms if gcd(c, n) > 1}, reverse=True):
            small = total((m, c) for m, c in a.terms if c % g)
            big = total((m, c // g) for m, c in a.terms if c % g == 0)
            if big.terms and proves_nonnegative(small) and proves_less(small, expr(g)):
                dq, dr = divmod_(big, expr(n // g))
                return dq, dr * g + small
        atom = a.atom
        if isinstance(atom, Quotient) and atom.den.is_const:
            inner = int(atom.den)
            if atom.kind == "//":
                # (x // inner) // n = x // (inner * n); the remainder has no such form.
                return atom.num // (inner * n), of(Quotient("%", a, b))
            if inner % n == 0:
                # (x % (k*n)) // n = (x // n) % k ; (x % (k*n)) % n = x % n
                return (atom.num // n) % (inner // n), atom.num % n
        if n > 0 and _is_negated_size(a):
            # -x // n = -((x + n - 1) // n): a number of elements rounded up has one form, which is torch's.
            return -((n - 1 - a) // b), of(Quotient("%", a, b))
    return of(Quotient("//", a, b)), of(Quotient("%", a, b))


def _is_negated_size(a: Expr) -> bool:
    """Whether an expression of sizes alone begins with one that is subtracted."""
    first = next((c for monomial, c in a.terms if monomial), 0)
    return first < 0 and not any(isinstance(atom, (Var, Val)) for atom in a.atoms())


Expr._divided = staticmethod(divmod_)  # type: ignore[assignment]
