"""Integer index expressions: polynomials over loop variables and size symbols, hash-consed and simplified as they are built.

All arithmetic is over the integers with Python's floor semantics for `//` and `%`. Sizes are never negative. The class is deliberately
smaller than a computer algebra system: compile time is a feature, and an index needs only what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import gcd, prod
from typing import Any
from weakref import WeakValueDictionary

from .atoms import Atom, Monomial, Quotient, Sym, Val, Var
from .monomials import collect, divide_monomial, plus, print_expr, products, whole


class Expr:
    """A sum of `coefficient * monomial`, kept sorted. Immutable; equal expressions are the same object."""

    __slots__ = ("__weakref__", "_atoms", "_bounds", "_hash", "_key", "_text", "is_const", "terms")
    _text: str | None
    _key: str | None
    _atoms: frozenset[Atom] | None
    _bounds: tuple[int | None, int | None] | None
    _hash: int
    terms: tuple[tuple[Monomial, int], ...]
    is_const: bool

    def __new__(cls, terms: tuple[tuple[Monomial, int], ...]) -> Expr:
        found = _EXPRS.get(terms)
        if found is not None:
            return found
        new = super().__new__(cls)
        new.terms, new._text, new._key, new._atoms, new._bounds = terms, None, None, None, None
        new.is_const = not terms or (len(terms) == 1 and not terms[0][0])
        new._hash = hash(int(new)) if new.is_const else id(new)
        return _EXPRS.setdefault(terms, new)

    # -- shape of the expression ---------------------------------------------------------------------------------------
    def __int__(self) -> int:
        if not self.is_const:
            raise TypeError(f"index expression {self} is not a constant")
        return self.terms[0][1] if self.terms else 0

    @property
    def atom(self) -> Atom | None:
        """The single atom that this expression is, or None."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            return self.terms[0][0][0]
        return None

    @property
    def var(self) -> Var | None:
        atom = self.atom
        return atom if isinstance(atom, Var) else None

    @property
    def text(self) -> str:
        """For readers: variables by name only."""
        if self._text is None:
            self._text = print_expr(self)
        return self._text

    @property
    def key(self) -> str:
        """Unique: variables with their extents."""
        if self._key is None:
            self._key = "+".join(f"{c}*{'*'.join(a.text for a in m)}" for m, c in self.terms)
        return self._key

    def __repr__(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text

    def __add__(
        self, other: int | Expr
    ) -> Expr:  # what has a dtype is a value of the loops, whose own operators take sizes
        return NotImplemented if hasattr(other, "dtype") else Expr(plus(self.terms, expr(other).terms))

    __radd__ = __add__

    def __neg__(self) -> Expr:
        return Expr(tuple((m, -c) for m, c in self.terms))

    def __sub__(self, other: int | Expr) -> Expr:
        return NotImplemented if hasattr(other, "dtype") else self + (-expr(other))

    def __rsub__(self, other: int | Expr) -> Expr:
        return expr(other) + (-self)

    def __mul__(self, other: int | Expr) -> Expr:
        if isinstance(other, Expr) and (self is ONE or other is ONE):
            return other if self is ONE else self
        return NotImplemented if hasattr(other, "dtype") else _sum(products(self.terms, expr(other).terms))

    __rmul__ = __mul__

    def __floordiv__(self, other: int | Expr) -> Expr:
        return divmod_(self, expr(other))[0]

    def __rfloordiv__(self, other: int) -> Expr:
        return divmod_(expr(other), self)[0]

    def __mod__(self, other: int | Expr) -> Expr:
        return divmod_(self, expr(other))[1]

    def __rmod__(self, other: int) -> Expr:
        return divmod_(expr(other), self)[1]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.is_const and int(self) == other
        return self is other

    def __hash__(self) -> int:
        return self._hash

    def atoms(self) -> frozenset[Atom]:
        """Every atom that occurs, also inside quotients (not inside the nodes of `Val`)."""
        if self._atoms is None:
            self._atoms = self._find_atoms()
        return self._atoms

    def _find_atoms(self) -> frozenset[Atom]:
        found: set[Atom] = set()
        stack = [self]
        while stack:
            for monomial, _ in stack.pop().terms:
                for a in monomial:
                    if a not in found:
                        found.add(a)
                        if isinstance(a, Quotient):
                            stack += (a.num, a.den)
        return frozenset(found)

    def coefficient(self, var: Atom) -> Expr | None:
        """The factor of `var` if the expression is affine in it (0 if absent), else None."""
        if self.is_const:
            return ZERO
        parts: list[tuple[Monomial, int]] = []
        for monomial, c in self.terms:
            if var in monomial:
                rest = list(monomial)
                rest.remove(var)
                if var in rest or any(_mentions(a, var) for a in rest):
                    return None
                parts.append((tuple(rest), c))
            elif any(_mentions(a, var) for a in monomial):
                return None
        return _sum(parts)

    def subst(self, mapping: Mapping[Atom, int | Expr], on_value: Callable[[Any], Any] | None = None) -> Expr:
        """Replace atoms; `on_value` maps the node inside a `Val` (an indirect index)."""
        if self.is_const:
            return self
        terms = self.terms
        if len(terms) == 1 and terms[0][1] == 1 and len(terms[0][0]) == 1:  # most coordinates are one variable
            atom = terms[0][0][0]
            if atom in mapping:
                return expr(mapping[atom])
            if isinstance(atom, Var):
                return self
        return _subst(self, mapping, on_value, {})


_EXPRS: WeakValueDictionary[tuple, Expr] = WeakValueDictionary()
ZERO = Expr(())
ONE = Expr((((), 1),))


def expr(value: int | Expr) -> Expr:
    """Coerce an integer; TypeError for another number."""
    if isinstance(value, Expr):
        return value
    return Expr((((), whole(value)),)) if value else ZERO


def of(atom: Atom) -> Expr:
    """The expression that is just `atom`. A loop variable of extent 1 is 0."""
    if isinstance(atom, Var) and isinstance(atom.extent, int) and atom.extent == 1:
        return ZERO
    return Expr((((atom,), 1),))


def var(name: str, extent: int | Expr) -> Expr:
    return of(Var(name, size(extent)))


def sym(name: str, hint: int | None = None) -> Expr:
    return of(Sym(name, hint))


def size(value: int | Expr) -> int | Expr:
    """Canonical size: an `int` when known, else an `Expr`."""
    return int(value) if isinstance(value, Expr) and value.is_const else value


def product(values: Iterable[int | Expr]) -> int | Expr:
    return size(prod(values))


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
    q: list[tuple[Monomial, int]] = []
    rest: list[tuple[Monomial, int]] = []
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
    quotient, remainder = _sum(q), _sum(rest)
    if not remainder.terms:
        return quotient, ZERO
    if proves_nonnegative(remainder) and proves_less(remainder, b):
        return quotient, remainder
    if proves_less(remainder, ZERO) and proves_nonnegative(remainder + b):
        return quotient - 1, remainder + b
    dq, dr = _reduce_quotient(remainder, b)
    return quotient + dq, dr


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


def _reduce_quotient(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """Quotient and remainder of an `a` no term of which b divides."""
    if isinstance(a.atom, Quotient) and a.atom.kind == "%" and a.atom.den is b and (bounds(b)[0] or 0) >= 0:
        return ZERO, a  # a remainder already (of a size, which no loop goes through where it is 0)
    if b.is_const:
        n = int(b)
        # a = g*A + s with 0 <= s < g and g | b: (g*A + s) // (g*B) = A // B.
        for g in sorted({gcd(c, n) for _, c in a.terms if gcd(c, n) > 1}, reverse=True):
            small = _sum((m, c) for m, c in a.terms if c % g)
            big = _sum((m, c // g) for m, c in a.terms if c % g == 0)
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


def _sum(terms: Iterable[tuple[Monomial, int]]) -> Expr:
    return Expr(collect(terms))


def _mentions(atom: Atom, var: Atom) -> bool:
    if atom is var:
        return True
    if isinstance(atom, Quotient):
        return any(_mentions(a, var) for e in (atom.num, atom.den) for m, _ in e.terms for a in m)
    if isinstance(atom, Val):
        return atom.node.mentions(var)
    return False


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
    blocks, rest = (ZERO, ONE) if a.num.var is None else divmod_(expr(a.num.var.extent), a.den)
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


def _subst(
    e: Expr, mapping: Mapping[Atom, int | Expr], on_value: Callable[[Any], Any] | None, memo: dict[Expr, Expr]
) -> Expr:
    if e in memo:
        return memo[e]
    atoms = e.atoms()
    if mapping.keys().isdisjoint(atoms) and (on_value is None or not any(isinstance(a, Val) for a in atoms)):
        return e
    changed = False
    parts: list[tuple[Monomial, int]] = []
    for monomial, c in e.terms:
        if all(isinstance(a, Sym) and a not in mapping for a in monomial):
            parts.append((monomial, c))  # most terms of a long sum, such as the offset of one of many tensors
            continue
        new = [_subst_atom(a, mapping, on_value, memo) for a in monomial]
        if all(n.atom is a for n, a in zip(new, monomial, strict=True)):
            parts.append((monomial, c))
            continue
        changed = True
        piece = expr(c)
        for n in new:
            piece = piece * n
        parts += piece.terms
    result = _sum(parts) if changed else e
    memo[e] = result
    return result


def _subst_atom(
    a: Atom, mapping: Mapping[Atom, int | Expr], on_value: Callable[[Any], Any] | None, memo: dict[Expr, Expr]
) -> Expr:
    if a in mapping:
        return expr(mapping[a])
    if isinstance(a, Quotient):
        num, den = _subst(a.num, mapping, on_value, memo), _subst(a.den, mapping, on_value, memo)
        if num is a.num and den is a.den:
            return of(a)
        return num // den if a.kind == "//" else num % den
    if isinstance(a, Val) and on_value is not None:
        return on_value(a)
    return of(a)


__all__ = [
    "ONE",
    "ZERO",
    "Atom",
    "Expr",
    "Monomial",
    "Quotient",
    "Sym",
    "Val",
    "Var",
    "bounds",
    "divmod_",
    "expr",
    "of",
    "product",
    "proves_less",
    "proves_nonnegative",
    "recombine",
    "size",
    "sym",
    "var",
]
