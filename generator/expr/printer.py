"""Tree → Python text with the fewest parentheses. Without a resolution, printing a parsed text gives its canonical form."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from ..render import literal

_BINARY: dict[type, tuple[str, int]] = {
    ast.BitOr: ("|", 6), ast.BitXor: ("^", 7), ast.BitAnd: ("&", 8), ast.LShift: ("<<", 9), ast.RShift: (">>", 9), ast.Add: ("+", 10),
    ast.Sub: ("-", 10), ast.Mult: ("*", 11), ast.Div: ("/", 11), ast.FloorDiv: ("//", 11), ast.Mod: ("%", 11), ast.Pow: ("**", 13),
}  # fmt: skip
_COMPARE: dict[type, str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Is: "is", ast.IsNot: "is not", ast.In: "in",
    ast.NotIn: "not in",
}  # fmt: skip
_UNARY: dict[type, tuple[str, int]] = {
    ast.Not: ("not ", 4),
    ast.USub: ("-", 12),
    ast.UAdd: ("+", 12),
    ast.Invert: ("~", 12),
}
_TEST, _OR, _AND, _COMPARING, _ATOM = 1, 2, 3, 5, 20


@dataclass(frozen=True)
class As:
    """How a node is printed instead of verbatim.

    name      a name, or the callee of a call, printed so
    call      an operator, comparison or subscript printed as a call of `name`
    overload  the operator that is called, printed as the first argument
    wrap      a function applied to the whole
    """

    name: str
    call: bool = False
    overload: str = ""
    wrap: str = ""

    @property
    def lead(self) -> tuple[str, ...]:
        """What is printed before the arguments of the call."""
        return (literal(self.overload),) if self.overload else ()


Resolution = Mapping[ast.AST, As]
_EMPTY: Resolution = {}


def symbol_of(node: ast.AST) -> str:
    """`+` for an `ast.Add`, and so on."""
    return (
        _BINARY[type(node)][0] if type(node) in _BINARY else _COMPARE.get(type(node)) or _UNARY[type(node)][0].strip()
    )


def print_expression(node: ast.expr, resolved: Resolution = _EMPTY) -> str:
    """One line of Python."""
    return _Printer(resolved).at(node, 0)


def print_body(body: list[ast.stmt], resolved: Resolution = _EMPTY, indent: int = 0) -> str:
    """Statements, each on its line."""
    p = _Printer(resolved)
    return "".join(line + "\n" for s in body for line in p.statement(s, "    " * indent))


class _Printer:
    def __init__(self, resolved: Resolution) -> None:
        self.resolved = resolved

    def statement(self, node: ast.stmt, pad: str) -> list[str]:
        if isinstance(node, ast.Assign):
            return [f"{pad}{self.target(node.targets[0])} = {self.at(node.value, 0)}"]
        if isinstance(node, ast.Return):
            if isinstance(node.value, ast.Tuple) and len(node.value.elts) > 1:
                return [f"{pad}return {', '.join(self.at(e, _TEST) for e in node.value.elts)}"]
            return [f"{pad}return {self.at(node.value, 0)}" if node.value is not None else f"{pad}return"]
        assert isinstance(node, ast.If)
        lines = [f"{pad}if {self.at(node.test, 0)}:"]
        while True:
            for s in node.body:
                lines += self.statement(s, pad + "    ")
            if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
                node = node.orelse[0]
                lines.append(f"{pad}elif {self.at(node.test, 0)}:")
                continue
            if node.orelse:
                lines.append(f"{pad}else:")
                for s in node.orelse:
                    lines += self.statement(s, pad + "    ")
            return lines

    def target(self, node: ast.expr) -> str:
        if isinstance(node, ast.Tuple):
            inner = ", ".join(f"({self.target(e)})" if isinstance(e, ast.Tuple) else self.target(e) for e in node.elts)
            return f"({inner},)" if len(node.elts) == 1 else inner
        return self.at(node, 0)

    def at(self, node: ast.expr, least: int) -> str:
        """`node`, in parentheses when it binds more loosely than `least`."""
        text, binds = self.node(node)
        return f"({text})" if binds < least else text

    def node(self, node: ast.expr) -> tuple[str, int]:
        how = self.resolved.get(node)
        if how is not None and how.call:
            args = ", ".join([*how.lead, *self.operands(node)])
            return f"{how.name}({args})", _ATOM
        if isinstance(node, ast.Constant):
            return (
                literal(node.value),
                12 if isinstance(node.value, (int, float)) and _negative(node.value) else _ATOM,
            )
        if isinstance(node, ast.Name):
            return (how.name if how else node.id), _ATOM
        if isinstance(node, ast.Attribute):
            return f"{self.at(node.value, _ATOM)}.{node.attr}", _ATOM
        if isinstance(node, ast.BinOp):
            symbol, level = _BINARY[type(node.op)]
            if symbol == "**":
                return f"{self.at(node.left, level + 1)} ** {self.at(node.right, 12)}", level
            return f"{self.at(node.left, level)} {symbol} {self.at(node.right, level + 1)}", level
        if isinstance(node, ast.UnaryOp):
            symbol, level = _UNARY[type(node.op)]
            return f"{symbol}{self.at(node.operand, level)}", level
        if isinstance(node, ast.BoolOp):
            word, level = (" and ", _AND) if isinstance(node.op, ast.And) else (" or ", _OR)
            return word.join(self.at(v, level + 1) for v in node.values), level
        if isinstance(node, ast.Compare):
            symbol = _COMPARE[type(node.ops[0])]
            return (
                f"{self.at(node.left, _COMPARING + 1)} {symbol} {self.at(node.comparators[0], _COMPARING + 1)}",
                _COMPARING,
            )
        if isinstance(node, ast.IfExp):
            return f"{self.at(node.body, _OR)} if {self.at(node.test, _OR)} else {self.at(node.orelse, _TEST)}", _TEST
        if isinstance(node, ast.List):
            return f"[{', '.join(self.at(e, _TEST) for e in node.elts)}]", _ATOM
        if isinstance(node, ast.Tuple):
            inner = ", ".join(self.at(e, _TEST) for e in node.elts)
            return f"({inner},)" if len(node.elts) == 1 else f"({inner})", _ATOM
        if isinstance(node, ast.ListComp):
            return f"[{self.comprehension(node)}]", _ATOM
        if isinstance(node, ast.GeneratorExp):
            return f"({self.comprehension(node)})", _ATOM
        if isinstance(node, ast.Starred):
            return f"*{self.at(node.value, 6)}", _TEST
        if isinstance(node, ast.Call):
            return self.call(node, how), _ATOM
        if isinstance(node, ast.Subscript):
            return f"{self.at(node.value, _ATOM)}[{', '.join(self.subscripts(node.slice))}]", _ATOM
        if isinstance(node, ast.Slice):
            lower = self.at(node.lower, _TEST) if node.lower else ""
            upper = self.at(node.upper, _TEST) if node.upper else ""
            return f"{lower}:{upper}", _TEST
        raise TypeError(f"no printed form for {type(node).__name__}")

    def call(self, node: ast.Call, how: As | None) -> str:
        if (
            len(node.args) == 1
            and isinstance(node.args[0], ast.GeneratorExp)
            and not node.keywords
            and not (how and how.overload)
        ):
            args = [self.comprehension(node.args[0])]
        else:
            args = [self.at(a, _TEST) for a in node.args]
        args += [f"{k.arg}={self.at(k.value, _TEST)}" for k in node.keywords]
        callee = how.name if how else self.at(node.func, _ATOM)
        text = f"{callee}({', '.join([*(how.lead if how else ()), *args])})"
        return f"{how.wrap}({text})" if how and how.wrap else text

    def comprehension(self, node: ast.ListComp | ast.GeneratorExp) -> str:
        g = node.generators[0]
        conditions = "".join(f" if {self.at(c, _OR)}" for c in g.ifs)
        return f"{self.at(node.elt, _TEST)} for {self.target(g.target)} in {self.at(g.iter, _OR)}{conditions}"

    def subscripts(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.Tuple) and node.elts:
            parts = [self.at(e, _TEST) for e in node.elts]
            return [parts[0] + ","] if len(parts) == 1 and not isinstance(node.elts[0], ast.Starred) else parts
        return [self.at(node, _TEST)]

    def operands(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.BinOp):
            return [self.at(node.left, _TEST), self.at(node.right, _TEST)]
        if isinstance(node, ast.UnaryOp):
            return [self.at(node.operand, _TEST)]
        if isinstance(node, ast.Compare):
            return [self.at(node.left, _TEST), self.at(node.comparators[0], _TEST)]
        assert isinstance(node, ast.Subscript)
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if len(inner) == 1 and isinstance(inner[0], ast.Starred):
            return [self.at(node.value, _TEST), self.at(inner[0].value, _TEST)]
        return [self.at(node.value, _TEST), f"[{', '.join(self.at(e, _TEST) for e in inner)}]"]


def _negative(value: float) -> bool:
    return not isinstance(value, bool) and (value < 0 or str(value)[0] == "-")
