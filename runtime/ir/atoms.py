"""What index expressions are made of besides integers: loop variables, size symbols, quotients, and values used as indices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from .monomials import operand

if TYPE_CHECKING:
    from .index import Expr


class Atom:
    """What a monomial is made of. `text` is unique per atom and gives the stable order of terms; `pretty` is for readers."""

    __slots__ = ("__weakref__", "text")
    text: str

    @property
    def pretty(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.pretty


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
        return f"({operand(self.num)} {self.kind} {operand(self.den)})"


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


_ATOMS: WeakValueDictionary[str, Atom] = WeakValueDictionary()
Monomial = tuple[Atom, ...]
