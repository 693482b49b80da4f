"""Sizes of the arguments that are at least 1, as guards say: a condition on a size is decided by it where nothing else tells."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ...ir.index import Atom, Expr, Sym, of

_POSITIVE: ContextVar[Collection[str]] = ContextVar("positive", default=())


@contextmanager
def known_positive(names: Collection[str]) -> Iterator[None]:
    """Symbols of these names are at least 1 in the block."""
    token = _POSITIVE.set(names)
    try:
        yield
    finally:
        _POSITIVE.reset(token)


def from_one(a: Expr, b: Expr) -> tuple[Expr, Expr] | None:
    """Two expressions with `n + 1` for each such size `n`, which is then any number from 0 on; None where they have none."""
    names = _POSITIVE.get()
    found = [s for s in a.atoms() | b.atoms() if isinstance(s, Sym) and s.name in names]
    more: dict[Atom, int | Expr] = {s: of(s) + 1 for s in found}
    return (a.subst(more), b.subst(more)) if found else None
