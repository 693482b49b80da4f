"""Integer index expressions and the atoms that they are made of, hash-consed and simplified as they are built.

All arithmetic is over the integers with Python's floor semantics for `//` and `%`. Sizes are never negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any
from weakref import WeakValueDictionary

from .monomials import Atom, Term, collect, plus, products, terms_text, whole


class Var(Atom):
    """A loop variable: 0 <= var < extent."""

    __slots__ = ("extent", "name")
    name: str
    extent: int | Expr

    def __new__(cls, name: str, extent: int | Expr) -> Var:
        # In brackets: `(i < n) - 1` and `(i < n - 1)` are two.
        text = f"{name}:{extent}" if isinstance(extent, int) else f"{name}:({extent.key})"
        found = _ATOMS.get(text)
        if isinstance(found, Var):
            return found
        new = super().__new__(cls)
        new.name, new.extent, new.text = name, extent, text
        return _ATOMS.setdefault(text, new)  # type: ignore[return-value]

    @property
    def pretty(self) -> str:
        return self.name


SIGNED = "_signed"
"""How the name of a symbol ends that may be negative."""


class Sym(Atom):
    """An integer known only at run time: a symbolic dimension, >= 0, or (its name ends in `_signed`) a number of either sign."""

    __slots__ = ("hint", "name")
    name: str
    hint: int | None

    def __new__(cls, name: str, hint: int | None = None) -> Sym:
        found = _ATOMS.get(name)
        if isinstance(found, Sym):
            return found
        new = super().__new__(cls)
        new.name, new.hint, new.text = name, hint, name
        return _ATOMS.setdefault(name, new)  # type: ignore[return-value]

    @property
    def signed(self) -> bool:
        """Whether it may be negative."""
        return self.name.endswith(SIGNED)


class Quotient(Atom):
    """`num // den` (kind "//") or `num % den` (kind "%") that could not be simplified away."""

    __slots__ = ("den", "kind", "num")
    kind: str
    num: Expr
    den: Expr

    def __new__(cls, kind: str, num: Expr, den: Expr) -> Quotient:
        text = f"(({num.key}) {kind} ({den.key}))"
        found = _ATOMS.get(text)
        if isinstance(found, Quotient):
            return found
        new = super().__new__(cls)
        new.kind, new.num, new.den, new.text = kind, num, den, text
        return _ATOMS.setdefault(text, new)  # type: ignore[return-value]

    @property
    def pretty(self) -> str:
        return f"({_operand(self.num)} {self.kind} {_operand(self.den)})"


class Val(Atom):
    """The value of an integer scalar node used as an index (gather, scatter), promised to lie in lo..hi (inclusive)."""

    __slots__ = ("hi", "lo", "node")
    node: Any
    lo: int | None
    hi: int | None

    def __new__(cls, node: Any, lo: int | None, hi: int | None) -> Val:
        text = f"val({node.key},{lo},{hi})"
        found = _ATOMS.get(text)
        if isinstance(found, Val):
            return found
        new = super().__new__(cls)
        new.node, new.lo, new.hi, new.text = node, lo, hi, text
        return _ATOMS.setdefault(text, new)  # type: ignore[return-value]

    @property
    def pretty(self) -> str:
        return f"at({self.node}, {self.lo}, {self.hi})"


def _operand(e: Expr) -> str:
    return e.text if e.is_const or e.atom is not None else f"({e.text})"


_ATOMS: WeakValueDictionary[str, Atom] = WeakValueDictionary()


# -- expressions -------------------------------------------------------------------------------------------------------
class Expr:
    """A sum of `coefficient * monomial`, kept sorted. Immutable; equal expressions are the same object."""

    __slots__ = ("__weakref__", "_atoms", "_bounds", "_hash", "_key", "_text", "is_const", "terms")
    _text: str | None
    _key: str | None
    _atoms: frozenset[Atom] | None
    _bounds: tuple[int | None, int | None] | None
    _hash: int
    terms: tuple[Term, ...]
    is_const: bool

    def __new__(cls, terms: tuple[Term, ...]) -> Expr:
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
            self._text = terms_text(self.terms)
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

    # What has a dtype is a value of the loops, whose own operators take sizes.
    def __add__(self, other: int | Expr) -> Expr:
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
        return NotImplemented if hasattr(other, "dtype") else total(products(self.terms, expr(other).terms))

    __rmul__ = __mul__

    # Division simplifies by what the ranges of the variables prove, so it builds on this class: `ir.division` sets it.
    _divided: Callable[[Expr, Expr], tuple[Expr, Expr]] = staticmethod(lambda a, b: _no_division())

    def __floordiv__(self, other: int | Expr) -> Expr:
        return Expr._divided(self, expr(other))[0]

    def __rfloordiv__(self, other: int) -> Expr:
        return Expr._divided(expr(other), self)[0]

    def __mod__(self, other: int | Expr) -> Expr:
        return Expr._divided(self, expr(other))[1]

    def __rmod__(self, other: int) -> Expr:
        return Expr._divided(expr(other), self)[1]

    def __divmod__(self, other: int | Expr) -> tuple[Expr, Expr]:
        return Expr._divided(self, expr(other))

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
        parts: list[Term] = []
        for monomial, c in self.terms:
            if var in monomial:
                rest = list(monomial)
                rest.remove(var)
                if var in rest or any(_mentions(a, var) for a in rest):
                    return None
                parts.append((tuple(rest), c))
            elif any(_mentions(a, var) for a in monomial):
                return None
        return total(parts)

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


def _no_division() -> tuple[Expr, Expr]:
    raise TypeError("division of index expressions needs runtime.ir.index to be imported")


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


def total(terms: Iterable[Term]) -> Expr:
    """The expression of the terms, in any order and not yet collected."""
    return Expr(collect(terms))


def _mentions(atom: Atom, var: Atom) -> bool:
    if atom is var:
        return True
    if isinstance(atom, Quotient):
        return any(_mentions(a, var) for e in (atom.num, atom.den) for m, _ in e.terms for a in m)
    if isinstance(atom, Val):
        return atom.node.mentions(var)
    return False


# -- substitution ------------------------------------------------------------------------------------------------------
def _subst(
    e: Expr, mapping: Mapping[Atom, int | Expr], on_value: Callable[[Any], Any] | None, memo: dict[Expr, Expr]
) -> Expr:
    if e in memo:
        return memo[e]
    atoms = e.atoms()
    if mapping.keys().isdisjoint(atoms) and (on_value is None or not any(isinstance(a, Val) for a in atoms)):
        return e
    changed = False
    parts: list[Term] = []
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
    result = total(parts) if changed else e
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
