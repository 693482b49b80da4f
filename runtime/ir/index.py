"""Integer index expressions: polynomials over loop variables and size symbols, hash-consed and simplified as they are built.

The parts are `monomials` (terms and their order), `expr` (atoms, expressions, substitution), `recombine`, `bounds` and `division`; import them
through this module, which completes them. They are deliberately less than a computer algebra system: compile time is a feature, and an index
needs only what is here.
"""

from __future__ import annotations

from .bounds import bounds, proves_less, proves_nonnegative
from .division import divmod_
from .expr import ONE, SIGNED, ZERO, Expr, Quotient, Sym, Val, Var, expr, of, product, size, sym, var
from .monomials import Atom, Monomial, collect, divide_monomial
from .recombine import recombine

__all__ = [
    "ONE", "SIGNED", "ZERO", "Atom", "Expr", "Monomial", "Quotient", "Sym", "Val", "Var", "bounds", "collect", "divide_monomial", "divmod_",
    "expr", "of", "product", "proves_less", "proves_nonnegative", "recombine", "size", "sym", "var",
]  # fmt: skip
