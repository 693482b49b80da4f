"""Sizes in the graph: every symbolic integer, float or bool that an operator takes becomes a node, made from its
expression.

Nothing is traced for arithmetic on sizes while the program runs: the expression that arrives at an operator says it
all, and equal expressions share one node.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from ....errors import UnsupportedError
from ....generated.dispatch_tables import ROLES
from ...torch_compat import function_of_numbers

_BINARY: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "PowByNatural": operator.pow,
    "FloatPow": operator.pow,
    "Pow": operator.pow,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
    "BitwiseFn_bitwise_and": operator.and_,
    "BitwiseFn_bitwise_or": operator.or_,
    "BitwiseFn_bitwise_xor": operator.xor,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "And": operator.and_,
    "Or": operator.or_,
}
_UNARY: dict[str, Callable[..., Any]] = {
    "ToFloat": torch.sym_float,
    "TruncToInt": math.trunc,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
    "RoundToInt": round,
    "Abs": operator.abs,
    "Not": torch.sym_not,
}
OF_NUMBERS = frozenset(_BINARY.values())
"""Functions of two of Python's numbers: arithmetic and comparisons."""

_OF_MATH = "OpaqueUnaryFn_"
"""How torch's names of the functions of `math` begin."""


_TO_INTEGER = frozenset(("TruncToInt", "FloorToInt", "CeilToInt", "RoundToInt"))


def _is_integer(expr: Any) -> bool:
    """Whether an expression is an integer. Some of torch's functions say so of floats too: a remainder."""
    if not expr.args or type(expr).__name__ in _TO_INTEGER or not expr.is_integer:
        return bool(expr.is_integer)
    if type(expr).__name__ == "Piecewise":
        return all(_is_integer(value) for value, _ in expr.args)
    return all(map(_is_integer, expr.args))


def guards_tell(shape_env: Any) -> bool:
    """Whether guards see to it that what tracing has found of sizes holds where the graph is called. torch drops those that it finds false for
    all sizes, as it does where it takes a float for an integer.
    """
    guards = () if shape_env is None else (guard.expr for guard in shape_env.guards)
    return all(e != sympy.false and not any(map(_is_mistaken, sympy.preorder_traversal(e))) for e in guards)


def _is_mistaken(expr: Any) -> bool:
    return isinstance(expr, sympy.Expr) and bool(expr.is_integer) and not _is_integer(expr)


def without_choices(expr: Any) -> Any:
    """The expression with and, or and not for each `ITE`, sympy's choice between two booleans, which it makes of comparisons of choices."""
    return expr.replace(sympy.ITE, lambda c, value, rest: (c & value) | (~c & rest))


class Symbols:
    """Nodes for symbolic expressions: `bind` says where a symbol can be read, `node` gives an expression's node."""

    def __init__(self, graph: fx.Graph, shape_env: Any) -> None:
        self.graph = graph
        self.shape_env = shape_env
        self.nodes: dict[Any, fx.Node] = {}
        self.sources: dict[sympy.Symbol, tuple[fx.Node, str, int]] = {}

    def bind(self, value: Any, node: fx.Node) -> None:
        """Remember that `node` (a placeholder, or a call that returned a fresh symbol) is the value of a symbolic
        number.
        """
        expr = value.node.expr
        if isinstance(expr, sympy.Symbol):
            self.nodes.setdefault(expr, node)
        elif isinstance(expr, sympy.Integer):
            return

    def bind_sizes(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Remember the symbols that are sizes or strides of the tensor `node`."""
        for how, values in (
            ("size", tensor.shape),
            ("stride", tensor.stride()),
            ("offset", (tensor.storage_offset(),)),
        ):
            for dim, value in enumerate(values):
                if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
                    self.sources.setdefault(value.node.expr, (node, how, dim))

    def node(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
        """The node of a symbolic number, or a plain number when its value has become known. Raises
        `UnsupportedError`.
        """
        return self._expr(value.node.expr, type(value))

    def of_symbol(self, symbol: sympy.Symbol) -> fx.Node:
        """The node of one symbol. Raises `UnsupportedError` when nothing in the graph has it."""
        node: fx.Node = self._expr(symbol, torch.SymInt)
        return node

    def is_of_input(self, symbol: sympy.Symbol) -> bool:
        """Whether an input of the graph tells a symbol."""
        return self.read_from_input(symbol) is not None

    def read_from_input(self, symbol: sympy.Symbol) -> str | None:
        """Python source that reads a symbol from an input of the graph, which stands by its name in braces; None if no input tells it."""
        node = self.nodes.get(symbol)
        source, how, dim = self.sources.get(symbol, (None, "", 0))
        if node is not None and node.op == "placeholder":
            return f"{{{node.name}}}"
        if source is None or source.op != "placeholder":
            return None
        return (
            f"{{{source.name}}}."
            + {"size": f"size({dim})", "stride": f"stride({dim})", "offset": "storage_offset()"}[how]
        )

    def _expr(self, expr: Any, kind: type) -> Any:
        if isinstance(expr, (sympy.Integer, int)) and not isinstance(expr, bool):
            return int(expr)
        if isinstance(expr, sympy.Rational | sympy.Float):
            return float(expr)
        if expr in (sympy.true, sympy.false):
            return bool(expr)
        if isinstance(expr, (sympy.core.relational.Relational, sympy.logic.boolalg.BooleanFunction)):
            kind = torch.SymBool
        elif kind is torch.SymFloat and _is_integer(expr):  # a part of it: `n / max(n - 1, 1)` divides integers
            kind = torch.SymInt
        known = self.nodes.get(expr)
        if known is None:
            known = self.nodes[expr] = (
                self._symbol(expr) if isinstance(expr, sympy.Symbol) else self._compute(expr, kind)
            )
        return known

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        if symbol not in self.sources:
            raise UnsupportedError(f"the size {symbol} is used, but no input or result has it; pass it as an input")
        node, how, dim = self.sources[symbol]
        made = self._call(ROLES[how], (node,) if how == "offset" else (node, dim), symbol, torch.SymInt)
        return made

    def _compute(self, expr: Any, kind: type) -> fx.Node:
        name = type(expr).__name__
        if name == "Piecewise":
            (value, condition), *others = expr.args
            rest = others[0][0] if others[0][1] == sympy.true else expr.func(*others)
            parts = (self._expr(condition, torch.SymBool), self._expr(value, kind), self._expr(rest, kind))
            return self._call(torch.sym_ite, parts, expr, kind)
        if name == "ITE":
            return self._expr(without_choices(expr), torch.SymBool)  # type: ignore[no-any-return]
        if (function := _UNARY.get(name) or function_of_numbers(name.removeprefix(_OF_MATH))) is not None:
            return self._call(function, (self._expr(expr.args[0], torch.SymFloat),), expr, kind)
        if name == "RoundDecimal":
            number, digits = expr.args
            return self._call(round, (self._expr(number, torch.SymFloat), int(digits)), expr, kind)
        target = _BINARY.get(name)
        if target is None:
            raise UnsupportedError(
                f"the size expression {expr} uses {name}, which a graph cannot compute; mark the dimension static"
            )
        # Fold from the left: sums and products of sympy have any number of terms, in an order that does not vary.
        inner = kind if kind is not torch.SymBool else torch.SymFloat  # of integers: SymInt, as `_expr` sees to
        terms = [self._expr(a, inner) for a in expr.args]
        result, done = terms[0], expr.args[0]
        for argument, term in zip(expr.args[1:], terms[1:], strict=True):
            done = expr if argument is expr.args[-1] else expr.func(done, argument)
            result = self._call(target, (result, term), done, kind)
        return result

    def _call(self, target: Any, args: tuple[Any, ...], expr: Any, kind: type) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, {})
        node.meta["val"] = self._value(expr, kind)
        return node

    def _value(self, expr: Any, kind: type) -> Any:
        if kind is torch.SymInt:
            return self.shape_env.create_symintnode(expr, hint=None)
        if kind is torch.SymFloat:
            return self.shape_env.create_symfloatnode(expr, hint=None)
        return self.shape_env.create_symboolnode(expr)
