"""Python numbers that change from call to call, while an operator is lowered: floats that Dynamo has made symbols of.

Kernels read such a number from a tensor of one double, and compute in double what the program computes of it. Only calls of eager kernels, and the
other half of a training step, need it as a Python number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch

from ...errors import UnsupportedError
from ...generated.dispatch_tables import ROLES
from ..dispatch.symbols.sizes import without_choices
from ..ir.index import SIGNED, Expr, sym
from ..ir.learned import FUNCTIONS, Learned, names_in
from ..ir.nodes import Buffer, Node
from ..torch_compat import python_source
from .language.builder import Builder
from .language.number import Number, Truth, applied, as_double
from .language.tensor import Tensor
from .sizes.from_data import range_of
from .sizes.symbolic import Sizes

_OPERATORS: dict[Any, Callable[[Any, Any], Any]] = {
    f: f for f in (operator.add, operator.sub, operator.mul, operator.truediv)
}
"""Where Python raises an error, a kernel would go on with an infinity: it divides only by what is never 0, and leaves powers to Python."""


class Numbers:
    """Those of one graph, by torch's expression of each. `device`: where the graph runs."""

    def __init__(self, builder: Builder, sizes: Sizes, device: str) -> None:
        self.b, self.sizes, self.device = builder, sizes, device
        self._calls: dict[
            sympy.Expr, tuple[str, Any]
        ] = {}  # of those that are read from a tensor: by which call, from what
        self._named: dict[sympy.Expr, Expr] = {}  # of those that the wrapper has as Python numbers

    def given(self, name: str, val: torch.SymFloat | torch.SymBool) -> tuple[Number, Expr]:
        """A number that the graph is called with, and the wrapper's name for it."""
        symbol = self._name(val.node.expr, name)
        return self._in_memory(name, symbol, val), symbol

    def read(self, name: str, val: torch.SymFloat, target: str, tensor: Tensor, argument: Any, here: bool) -> Number:
        """What `target` reads from a tensor of one element, `argument` in calls of kernels. `here`: our kernels can read it too."""
        e = val.node.expr
        self._calls[e] = target, argument
        if not here:
            return self.in_python(name, val)
        node = self.b.at(tensor, [0 for _ in tensor.shape])
        return Number(node if node.dtype == "float64" else Node("to_dtype", (node,), "float64"))

    def in_python(self, name: str, val: torch.SymFloat | torch.SymBool) -> Number:
        """A number that Python has, or computes of sizes and others. Raises `UnsupportedError` where it cannot."""
        return self._in_memory(name, self.argument(val), val)

    @staticmethod
    def computed(function: Any, args: tuple[Any, ...], val: torch.SymFloat) -> Number | None:
        """What the program computes of numbers and sizes, `val` while it was traced; None where kernels cannot."""
        if function is torch.sym_float and (node := as_double(args[0])) is not None:
            return Number(node)
        known = _OPERATORS.get(function)
        if known is None or len(args) != 2 or (known is operator.truediv and not _divides(args[1], val)):
            return None
        found = applied(known, *args)
        return found if isinstance(found, Number) else None

    def argument(self, val: torch.SymFloat | torch.SymBool) -> Expr:
        """A number (an argument of a call, or a result) or a bool (a result). Raises `UnsupportedError` where Python cannot compute it."""
        e = val.node.expr
        if (found := self._named.get(e)) is not None:
            return found
        if e in self._calls:
            target, argument = self._calls[e]
            symbol = self._name(e, f"number{len(self._named)}")
            self.b.extern([], target, (argument,), (), True, effect=True, learns=(Learned(_text(symbol)),))
            return symbol
        parts = {s: sympy.Symbol(_text(self._part(s, val)), real=True) for s in e.free_symbols}
        source = python_source(without_choices(e).xreplace(parts))
        if names_in(source) - FUNCTIONS != {s.name for s in parts.values()}:
            raise UnsupportedError(f"the number {e} ({type(e).__name__}) cannot be computed in Python")
        symbol = self._name(e, f"number{len(self._named)}")
        self.b.extern([], "", (), (), True, effect=True, learns=(Learned(_text(symbol), source=source),))
        return symbol

    def tell(self, val: torch.SymInt) -> None:
        """Have Python know the numbers that an integer is made of, other than sizes. Raises `UnsupportedError` where it cannot."""
        for symbol in val.node.expr.free_symbols:
            if not symbol.is_integer and symbol.name not in self.sizes.floats:
                self.sizes.floats[symbol.name] = self._part(symbol, val)

    def _part(self, symbol: sympy.Symbol, val: torch.SymInt | torch.SymFloat | torch.SymBool) -> Expr:
        if symbol in self._named or symbol in self._calls:
            return self.argument(val.node.shape_env.create_symfloatnode(symbol, hint=None))
        if (size := self.sizes.symbols.get(symbol.name)) is not None:
            return size
        raise UnsupportedError(f"the number {val.node.expr} is made of {symbol}, which nothing in the graph tells")

    def _name(self, e: sympy.Expr, name: str) -> Expr:
        found = self._named[e] = self.sizes.symbols[name] = sym(f"{name}{SIGNED}", 1)
        return found

    def _in_memory(self, name: str, symbol: Expr, val: torch.SymFloat | torch.SymBool) -> Number:
        """The number in a tensor that kernels read."""
        kind, dtype = (Truth, torch.bool) if isinstance(val, torch.SymBool) else (Number, torch.float64)
        made = Buffer(self.b.fresh(name), (), str(dtype).removeprefix("torch."), ())
        options = (("dtype", dtype), ("device", torch.device(self.device)))
        (tensor,) = self.b.extern([made], str(ROLES["zeros"]), ([], symbol), options, True)
        return kind(self.b.at(tensor, []))


def _divides(divisor: Any, val: torch.SymFloat) -> bool:
    """Whether a number is known not to be 0, the divisor of the quotient `val`."""
    if isinstance(divisor, (int, float)):
        return divisor != 0
    e = val.node.expr
    if type(e).__name__ not in ("IntTrueDiv", "FloatTrueDiv"):
        return False
    least, most = range_of(val.node.shape_env, e.args[1])
    return bool(least > 0 or most < 0)


def _text(symbol: Expr) -> str:
    return symbol.atom.name  # type: ignore[union-attr]


__all__ = ["Number", "Numbers", "Truth"]
