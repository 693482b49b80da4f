"""Types and meanings of an expression: every name is resolved, every call checked, and how each node prints is recorded."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from ..diagnostics import did_you_mean
from .calls import check_call
from .checker import ExpressionChecker
from .function import Scope
from .helpers import COMPARISONS, CONSTANTS, HELPERS
from .narrow import narrowed
from .ops import VERBATIM, suggestions
from .printer import As, symbol_of
from .types import (
    ANY,
    BOOL,
    DTYPE,
    ELEM,
    INDEX,
    INT,
    NONE,
    NUMBER,
    STR,
    TENSOR,
    Type,
    describe,
    item_of,
    join,
    list_of,
    optional,
    strip,
)  # fmt: skip


class Inference(ExpressionChecker):
    """The types of all kinds of expressions."""

    # -- entry points --------------------------------------------------------------------------------------------------
    def expect(self, node: ast.expr, scope: Scope, want: Type) -> Type:
        """The type of `node`, which must be able to stand for a `want`."""
        have = self.infer(node, scope)
        self.require(node, have, want)
        return have

    def condition(self, node: ast.expr, scope: Scope) -> None:
        """`node` decides something while lowering: a Python truth value."""
        have = self.infer(node, scope)
        if have.kind == "elem":
            self.error(node, f"'{self.source.of(node)}' differs per element: choose with where(cond, a, b)")
        elif have.kind in ("tensor", "index", "number"):
            self.error(node, f"expected a bool, found {describe(have)} '{self.source.of(node)}'")

    # -- expressions ---------------------------------------------------------------------------------------------------
    def infer(self, node: ast.expr, scope: Scope) -> Type:
        """The type of `node`; `any` after a mistake, so that it is reported once."""
        mistakes = self.source.diags.mistakes
        if node in self.seen:
            result, found = self.seen[node]
            mistakes += found
            self.source.failed |= bool(found)
            return result
        before = len(mistakes)
        result = getattr(self, f"_{type(node).__name__.lower()}")(node, scope)
        if isinstance(node, ast.Call):
            # What a call means depends on its first argument, which is then looked at again: without this, twice per level.
            self.seen[node] = result, mistakes[before:]
        return result

    def _constant(self, node: ast.Constant, scope: Scope) -> Type:
        kinds = {bool: BOOL, int: INT, float: NUMBER, str: STR, type(None): NONE}
        return kinds[type(node.value)]

    def _name(self, node: ast.Name, scope: Scope) -> Type:
        name = node.id
        if name in scope:
            printed = self.fixed.get(name) or self.function.printed(name)
            if printed != name:
                self.resolved[node] = As(printed)
            return scope[name]
        if name in CONSTANTS:
            self.resolved[node] = As(self.function.imported(name))
            return CONSTANTS[name]
        names = self.function.names
        if name in HELPERS or name in names.scalars or name in names.packets():
            return self.error(node, f"'{name}' must be called: {name}(...)")
        if name in self.function.bound:
            return self.error(node, f"'{name}' may have no value here")
        hint = did_you_mean(name, suggestions(scope, CONSTANTS)) or self._arguments()
        return self.error(node, f"unknown name '{name}'{hint}")

    def _arguments(self) -> str:
        names = ", ".join(f"'{a}'" for a in sorted(self.function.arguments))
        return f"; the operator's arguments are {names}" if names else ""

    def _list(self, node: ast.List, scope: Scope) -> Type:
        item: Type | None = None
        for e in node.elts:
            t = self.starred(e.value, scope) if isinstance(e, ast.Starred) else self.infer(e, scope)
            item = t if item is None else join(item, t)
        return list_of(ANY if item is None else item)

    def starred(self, node: ast.expr, scope: Scope) -> Type:
        """The item type of what is unpacked by `*`."""
        t = self.infer(node, scope)
        item = item_of(t)
        return (
            self.error(node, f"'*' needs a list, found {describe(t)} '{self.source.of(node)}'")
            if item is None
            else item
        )

    def _starred(self, node: ast.Starred, scope: Scope) -> Type:
        return self.error(node, "'*' stands inside a list, a call or a subscript")

    def _tuple(self, node: ast.Tuple, scope: Scope) -> Type:
        if any(isinstance(e, ast.Starred) for e in node.elts):
            return self.error(node, "'*' in a tuple is not part of the expression language: use a list")
        return Type("tuple", tuple(self.infer(e, scope) for e in node.elts))

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp, scope: Scope) -> Type:
        g = node.generators[0]
        inner: Mapping[str, Type] = {**scope, **self.targets(g.target, g.iter, scope)}
        for c in g.ifs:
            self.condition(c, inner)
            inner = narrowed(c, inner, True)
        return list_of(self.infer(node.elt, inner))

    _generatorexp = _listcomp

    def targets(self, target: ast.expr, source: ast.expr, scope: Scope) -> dict[str, Type]:
        """Names bound by `for target in source`, with their types."""
        self.iterated.add(source)
        if (
            isinstance(source, ast.Call)
            and isinstance(source.func, ast.Name)
            and source.func.id in ("zip", "enumerate")
        ):
            self.infer(source, scope)  # reports mistakes
            items = [item_of(self.peek(a, scope)) or ANY for a in source.args if not isinstance(a, ast.Starred)]
            item = Type("tuple", tuple([INT, *items][:2] if source.func.id == "enumerate" else items))
        else:
            t = self.infer(source, scope)
            found = item_of(t)
            item = (
                self.error(source, f"'for' needs a list, found {describe(t)} '{self.source.of(source)}'")
                if found is None
                else found
            )
        return self.bind(target, item)

    def bind(self, target: ast.expr, t: Type) -> dict[str, Type]:
        """Names of an assignment's target with their types."""
        if isinstance(target, ast.Name):
            printed = self.function.printed(target.id)
            if printed != target.id:
                self.resolved[target] = As(printed)
            return {target.id: t}
        assert isinstance(target, ast.Tuple)
        if t.kind == "tuple" and len(t.items) != len(target.elts):
            self.error(target, f"{len(target.elts)} names for {len(t.items)} values")
        elif t.kind not in ("tuple", "list", "any"):
            self.error(target, f"cannot unpack {describe(t)} into {len(target.elts)} names")
        items = (
            t.items
            if t.kind == "tuple" and len(t.items) == len(target.elts)
            else [item_of(t) or ANY] * len(target.elts)
        )
        out: dict[str, Type] = {}
        for e, item in zip(target.elts, items, strict=True):
            out |= self.bind(e, item)
        return out

    def _boolop(self, node: ast.BoolOp, scope: Scope) -> Type:
        conjunction = isinstance(node.op, ast.And)
        result: Type | None = None
        for k, v in enumerate(node.values):
            t = self.infer(v, scope)
            if t.kind in ("elem", "tensor"):
                word, symbol = ("and", "&") if conjunction else ("or", "|")
                return self.error(v, f"'{word}' decides while lowering: for {describe(t)} write '{symbol}'")
            last = k == len(node.values) - 1
            t = t if last or conjunction else strip(t)
            result = t if result is None else join(result, t)
            scope = narrowed(v, scope, conjunction)
        assert result is not None
        return result

    def _unaryop(self, node: ast.UnaryOp, scope: Scope) -> Type:
        t = self.infer(node.operand, scope)
        symbol = symbol_of(node.op)
        if symbol == "not":
            if t.kind in ("elem", "tensor"):
                return self.error(node, f"'not' decides while lowering: for {describe(t)} write '~'")
            return BOOL
        if t.kind == "tensor":
            if symbol == "-":
                return self.tensor_operator(node, "*")
            return self.tensor_operator(node, symbol)
        if t.kind == "elem" or (t.numeric and symbol != "~") or t.kind in ("int", "any"):
            return INT if t.kind == "bool" else t
        return self.error(
            node, f"'{symbol}' needs an elem or a number, found {describe(t)} '{self.source.of(node.operand)}'"
        )

    def _binop(self, node: ast.BinOp, scope: Scope) -> Type:
        a, b = self.infer(node.left, scope), self.infer(node.right, scope)
        symbol = symbol_of(node.op)
        if "tensor" in (a.kind, b.kind):
            other = b if a.kind == "tensor" else a
            if other.kind == "elem":
                side = node.left if a.kind == "tensor" else node.right
                return self.error(
                    side,
                    f"'{self.source.of(side)}' is a tensor beside an elem: read it at coordinates, {self.source.of(side)}[...]",
                )
            if other.kind == "tensor" or other.numeric:
                return self.tensor_operator(node, symbol)
        elif "elem" in (a.kind, b.kind):
            other = b if a.kind == "elem" else a
            if other.kind == "elem" or other.numeric:
                self.function.uses_scalars = True
                return ELEM
        elif a.kind == b.kind == "list" and symbol == "+":
            return list_of(join(a.item, b.item)) if a.item != ANY and b.item != ANY else a if b.item == ANY else b
        elif symbol == "*" and "list" in (a.kind, b.kind) and {a.kind, b.kind} <= {"list", "int", "any"}:
            return a if a.kind == "list" else b
        elif a.numeric and b.numeric:
            return self.arithmetic(a, b, symbol)
        for side, t in ((node.left, a), (node.right, b)):
            if t.kind == "optional":
                return self.error(side, f"'{self.source.of(side)}' may be None: test it with 'is None' first")
        return self.error(
            node,
            f"'{symbol}' between {describe(a)} '{self.source.of(node.left)}' and {describe(b)} '{self.source.of(node.right)}'",
        )

    @staticmethod
    def arithmetic(a: Type, b: Type, symbol: str) -> Type:
        """Python arithmetic of two numbers."""
        if "any" in (a.kind, b.kind):
            return ANY
        if a.kind == b.kind == "bool" and symbol in "&|^":
            return BOOL
        kinds = {"int" if t.kind == "bool" else t.kind for t in (a, b)}
        return NUMBER if "number" in kinds or symbol == "/" else INDEX if "index" in kinds else INT

    def tensor_operator(self, node: ast.expr, symbol: str) -> Type:
        """A Python operator on tensors: the operator that has this symbol."""
        overload = self.function.names.symbols.get(symbol)
        if overload is None:
            return self.error(node, f"no operator entry has the symbol '{symbol}'")
        self.function.calls.add(overload)
        if symbol not in VERBATIM:
            b = self.function.local("b")
            self.resolved[node] = As(f"{b}.call", call=True, overload=overload)
        return TENSOR

    def _compare(self, node: ast.Compare, scope: Scope) -> Type:
        left, right, op = node.left, node.comparators[0], node.ops[0]
        a, b = self.infer(left, scope), self.infer(right, scope)
        symbol = symbol_of(op)
        if isinstance(op, (ast.Is, ast.IsNot)):
            if not (isinstance(right, ast.Constant) and right.value is None):
                return self.error(right, f"'{symbol}' compares with None only: use '==' or '!='")
            return BOOL
        if isinstance(op, (ast.In, ast.NotIn)):
            if b.kind not in ("list", "tuple", "any"):
                return self.error(right, f"'{symbol}' needs a list, found {describe(b)} '{self.source.of(right)}'")
            if isinstance(right, (ast.List, ast.Tuple)):
                for e in right.elts:
                    self.dtype_literal(a, e)
            return BOOL
        kinds = (a.kind, b.kind)
        if "elem" in kinds:
            other = b if a.kind == "elem" else a
            if other.kind == "elem" or other.numeric:
                self.function.uses_scalars = True
                if symbol in ("==", "!="):
                    self.resolved[node] = As(self.function.scalar("eq" if symbol == "==" else "ne"), call=True)
                return ELEM
        elif "tensor" in kinds:
            other = b if a.kind == "tensor" else a
            if other.kind == "tensor" or other.numeric:
                return self.tensor_operator(node, symbol)
        elif symbol in ("==", "!="):
            self.dtype_literal(a, right)
            self.dtype_literal(b, left)
            return BOOL
        elif a.numeric and b.numeric:
            if "index" in kinds or "number" in kinds:
                self.resolved[node] = As(self.function.imported(COMPARISONS[symbol]), call=True)
            return BOOL
        for side, t in ((left, a), (right, b)):
            if t.kind == "optional":
                return self.error(side, f"'{self.source.of(side)}' may be None: test it with 'is None' first")
        return self.error(
            node,
            f"'{symbol}' between {describe(a)} '{self.source.of(left)}' and {describe(b)} '{self.source.of(right)}'",
        )

    def dtype_literal(self, other: Type, node: ast.expr) -> None:
        """A string compared with a dtype must be one."""
        if strip(other).kind == "dtype" and isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.require(node, STR, DTYPE)

    def _ifexp(self, node: ast.IfExp, scope: Scope) -> Type:
        self.condition(node.test, scope)
        a = self.infer(node.body, narrowed(node.test, scope, True))
        return join(a, self.infer(node.orelse, narrowed(node.test, scope, False)))

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Type:
        t = self.infer(node.value, scope)
        where = node.slice
        if t.kind == "tensor":
            for e in where.elts if isinstance(where, ast.Tuple) else [where]:
                if isinstance(e, ast.Starred):
                    self.require(e.value, self.starred(e.value, scope), INDEX, "coordinate: ")
                    continue
                have = self.infer(e, scope)
                if have.kind == "list":
                    self.error(
                        e,
                        f"'{self.source.of(e)}' is a list of coordinates: write {self.source.of(node.value)}[*{self.source.of(e)}]",
                    )
                else:
                    self.require(e, have, INDEX, "coordinate: ")
            self.resolved[node] = As(f"{self.function.local('b')}.at", call=True)
            return ELEM
        if isinstance(where, ast.Slice):
            for part in (where.lower, where.upper):
                if part is not None:
                    self.expect(part, scope, optional(INT))
            if t.kind in ("list", "any"):
                return t
            return self.error(node, f"cannot slice {describe(t)} '{self.source.of(node.value)}'")
        if t.kind == "elem":
            return self.error(
                node, f"'{self.source.of(node.value)}' is an elem here, not a tensor: it has no coordinates"
            )
        if t.kind == "optional":
            return self.error(node.value, f"'{self.source.of(node.value)}' may be None: test it with 'is None' first")
        self.expect(where, scope, INT)
        if t.kind == "tuple" and isinstance(where, ast.Constant) and isinstance(where.value, int):
            if not -len(t.items) <= where.value < len(t.items):
                return self.error(where, f"'{self.source.of(node.value)}' has {len(t.items)} items")
            return t.items[where.value]
        item = item_of(t)
        return (
            self.error(node, f"cannot subscript {describe(t)} '{self.source.of(node.value)}'") if item is None else item
        )

    def _slice(self, node: ast.Slice, scope: Scope) -> Type:
        return self.error(node, "a slice stands in the subscript of a list")

    def _call(self, node: ast.Call, scope: Scope) -> Type:
        return check_call(self, node, scope)
