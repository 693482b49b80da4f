"""Sizes that data brings while the graph runs: which call tells each, what is computed of sizes beyond sums and products, and what must hold.

Conditions are checked right behind the call that brings the last size they mention, so that all that comes later may rely on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import sympy
import torch

from ....errors import UnsupportedError
from ...ir.index import Expr
from ...ir.learned import Learned, names_in
from ...ir.nodes import Extern, Nest
from ...torch_compat import python_source, runtime_asserts, symbol_hint, symbol_range

LIKELY = (24, 7, *range(2, 65), 1, 0)
"""What checkers take a size from data for: the first that the program's conditions allow."""
LARGE = 1 << 62
"""No bound: every integer of 64 bits is within."""


class Symbols(Protocol):
    """What `Sizes` knows of torch's symbols."""

    floats: dict[str, Expr]

    def note(self, value: Any, symbol: sympy.Symbol) -> bool:
        """As `Sizes.note`."""
        ...

    def named(self, symbol: sympy.Symbol) -> Expr:
        """As `Sizes.named`."""
        ...


class FromData:
    """What is learned while the graph runs, for the `sizes` of one graph.

    known     torch's names of symbols that an argument, or a call so far, tells.
    unhinted  the program's names of those that no example input tells; `may_be_zero`: of these, those that no condition keeps above 0.
    """

    def __init__(self, sizes: Symbols) -> None:
        self.sizes = sizes
        self.known: set[str] = set()
        self.unhinted: set[str] = set()
        self.may_be_zero: set[str] = set()
        self._of_results: set[sympy.Symbol] = set()
        self._derived: list[tuple[Learned, sympy.Expr]] = []
        self._demands: list[tuple[sympy.Basic, str]] = []  # of the program
        self._required: list[tuple[sympy.Basic, str]] = []  # since tracing relies on it
        self._env: Any = None

    def given(self, value: Any) -> None:
        """A tensor or a number that the graph is called with."""
        if isinstance(value, torch.Tensor):
            values = (*value.shape, *(value.stride() if value.layout == torch.strided else ()))
        else:
            values = (value,)
        for n in values:
            if isinstance(n, torch.SymInt) and n.node.expr.is_symbol:
                self._know(n, n.node.expr)

    def of_results(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> tuple[Learned, ...]:
        """The sizes that a call tells by what it returns: the buffers `names`."""
        found: list[Learned] = []
        for name, t in zip(names, tensors, strict=True):
            for dim, n in enumerate(t.shape):
                if not isinstance(n, torch.SymInt):
                    continue
                symbol, now = n.node._expr, n.node.expr
                if now is not symbol and (not symbol.is_symbol or symbol_hint(n, symbol) is not None):
                    symbol = now  # equal by a guard
                if symbol.is_symbol and symbol.name not in self.known:
                    self._of_results.add(symbol)
                    found.append(Learned(self._know(n, symbol), name, dim))
                    self._require_same(symbol, now)
        return tuple(found)

    def of_number(self, value: torch.SymInt) -> Learned | None:
        """The number that a call reads from data; None where it is known already. What the program has found out about it is checked."""
        symbol, now = value.node._expr, value.node.expr
        if not symbol.is_symbol or symbol.name in self.known:
            return None
        learned = Learned(self._know(value, symbol))
        low, high = symbol_range(value, symbol)
        if learned.symbol in self.unhinted:  # else guards see to it
            for bound, condition in ((low, symbol >= low), (high, symbol <= high)):
                if abs(bound) < LARGE:
                    self._require(condition)
        self._require_same(symbol, now)
        return learned

    def demand(self, condition: Any, message: str) -> None:
        """Raise a RuntimeError that says `message` unless the condition (SymBool or bool) holds. Raises `UnsupportedError` where it is about
        sizes that nothing tells.
        """
        e = sympy.S(condition) if isinstance(condition, bool) else condition.node._expr  # before it made two sizes one
        e = e if self._all_known(e) else condition.node.expr
        if not self._all_known(e):
            raise UnsupportedError(f"the condition {e} is about sizes that nothing in the graph tells")
        self._demands.append((e, message))

    def derive(self, e: sympy.Expr, name: str) -> None:
        """Compute the symbol `name` from others as soon as these are known. Raises `UnsupportedError` where Python cannot say how."""
        self._derived.append((Learned(name, source=self._source(e)), e))

    def is_unhinted(self, symbol: sympy.Symbol) -> bool:
        """Whether no example input tells a symbol of torch."""
        return self._name(symbol) in self.unhinted

    def changes(self, name: str, may_be_zero: bool) -> None:
        """Take a symbol of the program for one that no guard says anything about."""
        self.unhinted.add(name)
        if may_be_zero:
            self.may_be_zero.add(name)

    def limit(self, e: sympy.Expr) -> None:
        """Raise an error unless an integer has a place in 64 bits."""
        limits = sympy.And(e >= -(1 << 63), e < 1 << 63)
        self._required.append((limits, f"the number {e} is too large for an integer of 64 bits"))

    def settle(self, items: list[Nest | Extern]) -> None:
        """Put into `items` what is computed and what must hold, each where its sizes are known."""
        for e, message in runtime_asserts(self._env):
            # What is about sizes of the example inputs alone is a guard.
            if self._all_known(e) and any(self._name(s) in self.unhinted for s in e.free_symbols):
                self._required.append((e, message))
        last: dict[str, int] = {}
        for k, item in enumerate(items):
            if isinstance(item, Extern):
                last.update((s.symbol, k) for s in item.learns)
        at_start = Extern((), "", (), effect=True)
        changed: dict[int, Extern] = {}
        for learned, e in self._derived:
            self._add(e, items, last, changed, at_start, (learned,), ())
        for e, message in (*self._demands, *self._required):
            if e != sympy.true and not self._is_size(e):
                self._add(e, items, last, changed, at_start, (), ((self._source(e), message),))
        start = changed.pop(-1, None)
        for k, item in changed.items():
            items[k] = item
        if start is not None:
            items.insert(0, start)

    def _add(
        self,
        e: sympy.Basic,
        items: list[Nest | Extern],
        last: dict[str, int],
        changed: dict[int, Extern],
        at_start: Extern,
        learns: tuple[Learned, ...],
        demands: tuple[tuple[str, str], ...],
    ) -> None:
        k = max((last.get(self._name(s), -1) for s in e.free_symbols), default=-1)
        item = changed.get(k, at_start if k < 0 else items[k])
        assert isinstance(item, Extern)
        new = tuple(d for d in demands if d[0] not in {source for source, _ in item.demands})
        changed[k] = replace(item, learns=item.learns + learns, demands=item.demands + new)

    def likely(self, value: Any, symbol: sympy.Symbol) -> int:
        """A size that a symbol may have, as far as conditions on it alone say."""
        asserts = [e for e, _ in runtime_asserts(value.node.shape_env) if e.free_symbols == {symbol}]
        low, high = symbol_range(value, symbol)

        def may_be(n: int) -> bool:
            return bool(low <= n <= high) and all(
                e.xreplace({symbol: sympy.Integer(n)}) != sympy.false for e in asserts
            )

        return next((n for n in LIKELY if may_be(n)), LIKELY[0])

    # -- symbols -------------------------------------------------------------------------------------------------------
    def _know(self, value: Any, symbol: sympy.Symbol) -> str:
        self.known.add(symbol.name)
        self._env = value.node.shape_env
        if self.sizes.note(value, symbol):
            name, least = self._name(symbol), symbol_range(value, symbol)[0]
            self.unhinted.add(name)
            if least >= 1:
                self._require(symbol >= least)
            else:
                self.may_be_zero.add(name)
        return self._name(symbol)

    def _name(self, symbol: sympy.Symbol) -> str:
        return self.sizes.named(symbol).text

    def _all_known(self, e: sympy.Basic) -> bool:
        return all(s.name in self.known or s.name in self.sizes.floats for s in e.free_symbols)

    def _is_size(self, e: sympy.Basic) -> bool:
        """Whether a condition says no more than that the size of a result is not negative."""
        return isinstance(e, sympy.Ge) and e.lhs in self._of_results and e.rhs == 0

    def _require(self, e: sympy.Basic) -> None:
        self._required.append((e, f"Runtime assertion failed for expression {e}"))

    def _require_same(self, symbol: sympy.Symbol, now: sympy.Expr) -> None:
        """What the program has found out about a size from data: it is another one, or a number."""
        if now is not symbol:
            self._require(sympy.Eq(symbol, now))

    def _source(self, e: sympy.Basic) -> str:
        kinds = {True: {"integer": True}, False: {"real": True}}
        symbols = {s: sympy.Symbol(self._name(s), **kinds[bool(s.is_integer)]) for s in e.free_symbols}
        source = python_source(e.xreplace(symbols))
        if names_in(source) != {s.name for s in symbols.values()}:
            raise UnsupportedError(f"size expression {e} ({type(e).__name__}) has no index form")
        return source


def range_of(env: Any, e: sympy.Expr) -> tuple[Any, Any]:
    """The least and the greatest value of an expression, sympy numbers, as far as guards and conditions of the program say."""
    try:
        found = env.bound_sympy(e)
    except (
        RecursionError
    ):  # torch multiplies bounds of a power until they pass all numbers, which those of a negative base never do
        return -sympy.oo, sympy.oo
    return found.lower, found.upper
