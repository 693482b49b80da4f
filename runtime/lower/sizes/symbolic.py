"""Torch's symbolic sizes as index expressions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from ....errors import UnsupportedError
from ...ir.index import SIGNED, Expr, Sym, expr, sym
from ...ir.index import size as canonical
from ...ir.nodes import Size
from ...torch_compat import known, size_hint, symbol_hint, symbol_range
from .equal import EqualSizes
from .from_data import LARGE, LIKELY, FromData, range_of

FACTOR = 1 << 28
"""The greatest factor of a size that code computes with: a tensor has fewer than 2^35 elements, so that the product has a place in 64 bits."""


class Sizes:
    """Converts `int`s and `SymInt`s; remembers the symbols it has met, in order, and every expression that it has converted."""

    def __init__(self) -> None:
        self.symbols: dict[str, Expr] = {}
        self.floats: dict[
            str, Expr
        ] = {}  # by torch's names: numbers that integers are made of, as the program has them
        self.positive: set[str] = set()  # by torch's names: at least 1
        self.derived: set[str] = set()  # by the names of the program
        self._memo: dict[sympy.Expr, Size] = {}
        self._only_known = False
        self._hinted: set[str] = set()
        self._stride = False
        self.env: Any = None
        self.from_data = FromData(self)
        self.equal = EqualSizes(self)

    def argument(self, value: Any) -> Size:
        """A number that the graph is called with: its symbol is known, wherever it comes from."""
        self.from_data.given(value)
        if isinstance(value, torch.SymInt) and not all(s.is_integer for s in value.node.expr.free_symbols):
            self.env, e = (
                value.node.shape_env,
                value.node.expr,
            )  # the floats that it is made of are not among the arguments
            if e not in self._memo:
                self._memo[e] = self._fresh(e, size_hint(value, LIKELY[0]))
            return self._memo[e]
        return self.index(value)

    def index(self, value: Any) -> Size:
        """A size, stride or integer argument."""
        if type(value) is int:
            return value
        if isinstance(value, torch.SymInt):
            self._note_symbols(value)
            if (known := decided(value)) is None:
                return self.convert(value.node.expr)
            self._memo[value.node.expr] = known  # strides have it as a factor
            return known
        return int(value)

    @property
    def names(self) -> tuple[str, ...]:
        """The symbols as the program calls them, in the order in which they were met."""
        return tuple(a.name for e in self.symbols.values() if isinstance(a := e.atom, Sym))

    def _note_symbols(self, value: torch.SymInt) -> None:
        self.env = value.node.shape_env
        for symbol in value.node.expr.free_symbols:
            if symbol.name not in self._hinted and symbol.name not in self.floats:
                self.note(value, symbol)

    def note(self, value: Any, symbol: sympy.Symbol) -> bool:
        """Name a symbol, and let it know the size that it had while tracing: checkers use it, code never does. Whether it had none. Raises
        `UnsupportedError` where nothing that is known by now tells it.
        """
        self.env = value.node.shape_env
        hint = symbol_hint(value, symbol)
        if hint is None and symbol.name not in self.from_data.known:
            raise UnsupportedError(f"size {symbol.name} is made from data while the graph runs")
        if symbol.name not in self._hinted:
            self._hinted.add(symbol.name)
            least = symbol_range(value, symbol)[0]
            if hint is not None and least >= 1:
                self.positive.add(symbol.name)
            self._name(
                symbol.name, symbol.name, least >= 0, self.from_data.likely(value, symbol) if hint is None else hint
            )
        return hint is None

    def _name(self, key: str, name: str, nonnegative: bool, hint: int | None) -> Expr:
        found = self.symbols[key] = sym(name if nonnegative else f"{name}{SIGNED}")
        assert isinstance(found.atom, Sym)
        found.atom.hint = hint
        return found

    def strides(self, values: Any) -> tuple[Size, ...]:
        """As `shape`, for strides: torch writes max(1, n) where an empty dimension must not make them 0."""
        self._stride = True
        try:
            return self.shape(values)
        finally:
            self._stride = False

    def shape(self, values: Any) -> tuple[Size, ...]:
        found = tuple([v if type(v) is int else self.index(v) for v in values])
        none = None if self._stride else dimension_of_none(values)
        return found if none is None else (*found[:none], 0, *found[none + 1 :])

    def reduced(self, shape: Sequence[Size]) -> tuple[Size, ...]:
        """A shape that a lowering has computed, with sizes that are equal by a guard as the program has them."""
        return tuple([n if type(n) is int else self.equal.reduced(n) for n in shape])

    def convert(self, e: Any) -> Size:
        """A sympy expression of sums, products, powers, floor divisions and remainders of symbols."""
        found = self._memo.get(e)
        if found is None:
            self._memo[e] = canonical(self._convert(e))
            found = self._memo[e] = self.equal.reduced(self._memo[e])
        return found

    def polynomial(self, e: sympy.Expr) -> Size | None:
        """What an expression is at this moment, or None where it needs symbols that are not known yet."""
        if not all(s.name in self.symbols for s in e.free_symbols):
            return None
        memo, self._only_known = self._memo, True
        self._memo = dict(memo)
        try:
            return self.convert(e)
        except UnsupportedError:
            return None
        finally:
            self._memo, self._only_known = memo, False

    def _convert(self, e: Any) -> Size:
        if isinstance(e, (int, sympy.Integer)):
            return int(e)
        if isinstance(e, sympy.Symbol):
            if not e.is_integer:
                raise UnsupportedError(f"a size is made of the float {e}, of which no function makes an integer")
            return self.named(e)
        if isinstance(e, sympy.Add):
            total: Size = 0
            for a in e.args:
                total = total + self.convert(a)
            return total
        if isinstance(e, sympy.Mul):
            if any(isinstance(a, sympy.Integer) and abs(a) > FACTOR for a in e.args):
                raise UnsupportedError(f"the number {e} may be too large for an integer of 64 bits")
            result: Size = 1
            for a in e.args:
                result = result * self.convert(a)
            return result
        if isinstance(e, sympy.Pow) and isinstance(e.exp, sympy.Integer) and int(e.exp) > 0:
            base, result = self.convert(e.base), 1
            for _ in range(int(e.exp)):
                result = result * base
            return result
        # Torch's own function classes have no public home; their names are stable.
        name = type(e).__name__
        if name in ("FloorDiv", "CleanDiv", "Mod", "PythonMod") and range_of(self.env, e.args[1])[0] >= 1:
            number, divisor = expr(self.convert(e.args[0])), self.convert(e.args[1])
            return number // divisor if name.endswith("Div") else number % divisor
        if name == "Max" and self._stride and len(e.args) == 2 and 1 in e.args:
            return self.convert(next(a for a in e.args if a != 1))  # the strides of an empty tensor are never used
        return self._derived(e)

    def _derived(self, e: sympy.Expr) -> Size:
        """A symbol for what sums, products and quotients do not say, and for quotients by what may be 0: Python computes it when the graph runs."""
        if self._only_known:
            raise UnsupportedError(f"nothing has computed {e} yet")
        parts = {s: self.named(s) for s in e.free_symbols}
        hints = {s: a.hint for s, part in parts.items() if isinstance(a := part.atom, Sym)}
        value = e.xreplace({s: sympy.Integer(h) for s, h in hints.items() if h is not None})
        found = self._fresh(e, int(value) if value.is_Integer else None)
        self.derived.add(found.text)
        least, most = range_of(self.env, e)
        self.from_data.derive(e, found.text)
        if not (least >= -LARGE and most <= LARGE):
            self.from_data.limit(e)
        return found

    def _fresh(self, e: sympy.Expr, hint: int | None) -> Expr:
        """A new symbol that stands for an expression."""
        least, _ = range_of(self.env, e)
        key = f"size{sum(k.startswith('size') for k in self.symbols)}"
        found = self._name(key, key, bool(least >= 0), hint)
        if any(not s.is_integer or self.from_data.is_unhinted(s) for s in e.free_symbols):
            self.from_data.changes(found.text, may_be_zero=not least >= 1)
        return found

    def named(self, symbol: sympy.Symbol) -> Expr:
        """What the program calls a symbol of torch. Raises `UnsupportedError` where nothing has told it by now."""
        found = self.symbols.get(symbol.name) or self.floats.get(symbol.name)
        if found is None:
            raise UnsupportedError(f"a size is made of the number {symbol.name}, which nothing in the graph tells")
        return found


class Opaque:
    """A value that the loop IR cannot hold; only an error when something uses it."""

    def __init__(self, what: str, advice: str = "") -> None:
        self.what, self.advice = what, advice

    @classmethod
    def number(cls, val: torch.SymFloat | torch.SymBool) -> Opaque:
        """A number that Dynamo has made a symbol of, since it may differ from call to call."""
        if isinstance(val, torch.SymBool):
            return cls("a symbolic bool")
        return cls(
            "a Python number that changes between calls (a symbolic float)",
            "; make it a tensor (an optimizer: lr=torch.tensor(...)), or a number that is known at compile time (dynamic=False)",
        )


def decided(size: object) -> int | None:
    """The number, 0 or 1, that guards say an expression of symbols is (a broadcast was decided by it), or None; adds no guard."""
    n = size_hint(size, -1)
    # Only then can they; and the question is not cheap.
    return n if n in (0, 1) and known(size == n) else None


def dimension_of_none(sizes: Sequence[object]) -> int | None:
    """The dimension that guards say is the only one of 0 elements; None if that is not known. Adds no guard."""
    without = [k for k, n in enumerate(sizes) if size_hint(n, 1) == 0]
    if len(without) != 1 or type(sizes[without[0]]) is int:
        return None
    others = (n for k, n in enumerate(sizes) if k != without[0])
    return without[0] if known(math.prod(sizes) == 0) and all(known(n != 0) for n in others) else None  # type: ignore[arg-type]
