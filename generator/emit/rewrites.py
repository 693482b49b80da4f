"""Reads specs/rewrites.yaml, writes generated/rewrites.py (rules as data, by head overload) and tests/generated/test_rewrites.py."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from ..diagnostics import Diagnostics, did_you_mean
from ..load import Document, Entry
from ..model import Model
from ..render import header, literal, render

PATH = "generated/rewrites.py"
TESTS = "tests/generated/test_rewrites.py"
SPEC = "specs/rewrites.yaml"
PREDICATES = (
    "all_but_channels", "are_known", "composed", "dtype", "dtype_of_positions", "exact_widening", "has_backward", "has_elements", "is_bool",
    "is_few", "is_float", "is_half", "is_identity", "is_int", "is_number", "is_power_of_two", "is_returned", "is_seen", "is_small",
    "is_tensor", "made_of_smaller", "only_result_used", "opmath", "over_channels", "rank", "reads_result", "same_dtype", "same_pair",
    "same_shape", "same_sizes", "same_type", "shape", "short_of_vectors", "size", "users",
)  # fmt: skip
_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
    ast.Call, ast.Name, ast.Load, ast.Constant, ast.List, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod,
    ast.Subscript,
)  # fmt: skip


@dataclass(frozen=True)
class RuleSpec:
    """One rule, printed: `head` is the overload that the match begins with, `[k]` added where it takes one result, `[]` where any. `each`: the
    wildcard and the count of calls that are replaced together.
    """

    name: str
    doc: str
    head: str
    match: str
    when: str
    replace: str
    test: dict[str, Any]
    device: str = ""
    each: tuple[str, str] | None = None


class _Fault(Exception):
    """A mistake in an expression at a character offset of its text."""

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.offset = offset


def build(doc: Document, model: Model, diags: Diagnostics) -> tuple[RuleSpec, ...]:
    """The rules, checked: every operator exists, every name is bound by the match, a replacement differs from its match."""
    rules = []
    for entry in doc:
        rule = _build_one(entry, model, diags)
        if rule is not None:
            rules.append(rule)
    return tuple(rules)


def _build_one(entry: Entry, model: Model, diags: Diagnostics) -> RuleSpec | None:
    printer = _Printer(model)
    done: dict[str, str] = {}
    each = None
    for key in ("match", "each", "when", "replace"):
        text = str(entry.get(key, "True"))
        try:
            if key != "each":
                done[key] = printer.section(key, text)
            elif "each" in entry:
                each = printer.each(text)
        except _Fault as fault:
            diags.error(entry.pos(key, at=fault.offset), str(fault))
            return None
    if entry["match"] == entry.get("replace"):
        diags.error(entry.pos("replace"), "the replacement is the match itself: the rule would run forever")
        return None
    return RuleSpec(
        entry.id,
        entry["doc"],
        printer.head,
        done["match"],
        done["when"],
        done["replace"],
        dict(entry.get("test") or {}),
        str(entry.get("device") or ""),
        each,
    )


class _Printer:
    """Prints the three parts of a rule as Python; remembers the wildcards that the match binds."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.bound: set[str] = {"out", "device"}
        self.integers: set[str] = set()  # wildcards that stand for one
        self.head = ""

    def section(self, key: str, text: str) -> str:
        tree = _parse(text)
        if key == "match":
            printed = self.pattern(tree)
            if not self.head:
                raise _Fault("a match must be a call of an operator")
            return printed
        return self.expression(tree, calls=key == "replace")

    def each(self, text: str) -> tuple[str, str]:
        """The wildcard of `i < n`, and n printed."""
        tree = _parse(text)
        if (
            not isinstance(tree, ast.Compare)
            or not isinstance(tree.left, ast.Name)
            or [*map(type, tree.ops)] != [ast.Lt]
        ):
            raise _Fault(f"expected 'i < n', a wildcard of the match and how many there are of it, found '{text}'")
        name, count = tree.left.id, tree.comparators[0]
        self.expression(tree.left, calls=False)
        if name not in self.integers:
            kinds = ", ".join(sorted(self.integers)) or "none"
            raise _Fault(f"'{name}' does not stand for an integer (of this match: {kinds})", tree.left.col_offset)
        sizes = [n for n in ast.walk(count) if isinstance(n, ast.Call)]
        others = [n for n in ast.walk(count) if isinstance(n, ast.Constant) and type(n.value) is not int]
        if (
            not sizes
            or others
            or any(not isinstance(n.func, ast.Name) or n.func.id not in ("size", "rank") for n in sizes)
        ):
            raise _Fault(
                f"how many calls there are is told by sizes, as in 'i < size(x, 0)', found '{ast.unparse(count)}'",
                count.col_offset,
            )
        return name, self.expression(count, calls=False)

    # -- patterns ------------------------------------------------------------------------------------------------------
    def pattern(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            if node.id != "_":
                self.bound.add(node.id)
            return f"Wild({literal(node.id)})"
        if isinstance(node, ast.Constant):
            return f"Lit({literal(node.value)})"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return f"Lit({literal(-node.operand.value)})"  # type: ignore[operator]
        if isinstance(node, ast.List):
            inner = "".join(f"{self.pattern(e)}, " for e in node.elts).rstrip()
            return f"Items(({inner}))"
        if isinstance(node, ast.Subscript):
            return self.part(node)
        if isinstance(node, ast.Call):
            schema = self.overload(node.func)
            if not self.head:
                self.head = schema.id
            named = self.bind(node, schema)
            for name, value in named:
                arg = schema.arg(name)
                if isinstance(value, ast.Name) and arg is not None and arg.type in ("int", "SymInt"):
                    self.integers.add(value.id)
            args = "".join(f"({literal(name)}, {self.pattern(value)}), " for name, value in named).rstrip()
            return f"Call({literal(schema.id)}, ({args}))"
        raise _Fault(f"a pattern is a name, a literal, a list or a call, found '{ast.unparse(node)}'", node.col_offset)

    def part(self, node: ast.Subscript) -> str:
        """`call(...)[k]`: one of the results of a call that has several."""
        if isinstance(node.value, ast.Call) and isinstance(node.slice, ast.Name):
            outermost = not self.head
            call = self.pattern(node.value)
            if outermost:
                self.head += "[]"
            self.integers.add(node.slice.id)
            return f"Part({call}, {self.pattern(node.slice)})"
        k = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if not isinstance(node.value, ast.Call) or not isinstance(k, int):
            raise _Fault("a subscript takes a result of a call, as in 'topk(x, n)[0]'", node.col_offset)
        schema = self.overload(node.value.func)
        count = len(schema.returns)
        if not 0 <= k < count or count == 1:
            raise _Fault(f"'{schema.id}' has {count} result{'s' * (count != 1)}, found '[{k}]'", node.col_offset)
        outermost = not self.head
        call = self.pattern(node.value)
        if outermost:
            self.head = f"{schema.id}[{k}]"
        return f"Part({call}, {k})"

    def overload(self, func: ast.expr) -> Any:
        name = ast.unparse(func)
        parts = name.split(".")
        space = parts.pop(0) if parts[0] == "prims" and len(parts) > 1 else "aten"
        if len(parts) > 2:
            raise _Fault(
                f"expected an operator like 'relu', 'add.Tensor' or 'prims.fma', found '{name}'", func.col_offset
            )
        found = self.model.torch.get(f"{space}.{parts[0]}")
        if not found:
            near = did_you_mean(parts[0], [n.partition(".")[2] for n in self.model.torch.packets()])
            raise _Fault(f"torch has no operator '{space}.{parts[0]}'{near}", func.col_offset)
        which = parts[1] if len(parts) == 2 else "default"
        for schema in found:
            if schema.overload == which:
                return schema
        names = [s.overload for s in found]
        raise _Fault(
            f"'{space}.{parts[0]}' has no overload '{which}'{did_you_mean(which, names)}; it has {', '.join(names)}",
            func.col_offset,
        )

    def bind(self, node: ast.Call, schema: Any) -> list[tuple[str, ast.expr]]:
        """Arguments by name, in the schema's order."""
        positional = [a for a in schema.args if not a.kwarg_only]
        if len(node.args) > len(positional):
            raise _Fault(
                f"'{schema.id}' takes {len(positional)} positional arguments, found {len(node.args)}", node.col_offset
            )
        named = [(a.name, value) for a, value in zip(positional, node.args, strict=False)]
        for keyword in node.keywords:
            arg = schema.arg(keyword.arg)
            if arg is None:
                raise _Fault(
                    f"'{schema.id}' has no argument '{keyword.arg}'{did_you_mean(str(keyword.arg), [a.name for a in schema.args])}",
                    node.col_offset,
                )
            named.append((arg.name, keyword.value))
        given = {n for n, _ in named}
        for a in schema.args:
            if a.name not in given and a.default is None:
                raise _Fault(f"'{schema.id}' needs the argument '{a.name}'", node.col_offset)
        return named

    # -- conditions and replacements -----------------------------------------------------------------------------------
    def expression(self, node: ast.expr, calls: bool) -> str:
        if isinstance(node, ast.Name):
            if node.id in ("True", "False", "None"):
                return node.id
            if node.id not in self.bound:
                raise _Fault(
                    f"'{node.id}' is not bound by the match{did_you_mean(node.id, sorted(self.bound))}", node.col_offset
                )
            return f"m[{literal(node.id)}]"
        if isinstance(node, ast.Constant):
            return literal(node.value)
        if isinstance(node, ast.List):
            return "[" + ", ".join(self.expression(e, calls) for e in node.elts) + "]"
        if isinstance(node, ast.UnaryOp):
            return ("not " if isinstance(node.op, ast.Not) else "-") + self.expression(node.operand, False)
        if isinstance(node, ast.BoolOp):
            word = " and " if isinstance(node.op, ast.And) else " or "
            return word.join(f"({t})" if " or " in (t := self.expression(v, False)) else t for v in node.values)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            symbol = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}[
                type(node.ops[0])
            ]
            return f"{self.expression(node.left, False)} {symbol} {self.expression(node.comparators[0], False)}"
        if isinstance(node, ast.BinOp):
            symbol = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"}[
                type(node.op)
            ]
            return f"({self.expression(node.left, False)} {symbol} {self.expression(node.right, False)})"
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "result":
                arguments = ", ".join(self.expression(a, False) for a in node.args)
                return f"{'g' if calls else 'p'}.result({arguments})"
            if isinstance(node.func, ast.Name) and node.func.id in PREDICATES:
                return f"p.{node.func.id}({', '.join(self.expression(a, False) for a in node.args)})"
            if calls:
                schema = self.overload(node.func)
                named = dict(self.bind(node, schema))
                parts = [
                    self.expression(named[a.name], True) for a in schema.args if not a.kwarg_only and a.name in named
                ]
                parts += [
                    f"{a.name}={self.expression(named[a.name], True)}"
                    for a in schema.args
                    if a.kwarg_only and a.name in named
                ]
                return f"g.call({', '.join([literal(schema.id), *parts])})"
            name = ast.unparse(node.func)
            raise _Fault(f"unknown predicate '{name}'{did_you_mean(name, PREDICATES)}", node.col_offset)
        raise _Fault(f"'{ast.unparse(node)}' is not allowed here", node.col_offset)


def _parse(text: str) -> ast.expr:
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise _Fault(f"expected an expression: {error.msg}", max((error.offset or 1) - 1, 0)) from None
    for node in ast.walk(tree):
        if not isinstance(node, (*_ALLOWED, ast.keyword, ast.Attribute)):
            raise _Fault(f"'{type(node).__name__}' is not part of the rule language", getattr(node, "col_offset", 0))
    return tree.body


def emit(model: Model) -> dict[str, str]:
    """The rules and their tests, or nothing when there is no spec."""
    rules: tuple[RuleSpec, ...] = model.part("rewrites")
    if not rules:
        return {}
    heads = sorted({r.head for r in rules})
    text = render("rewrites.py.j2", header=header(PATH, SPEC), rules=rules, heads=heads, literal=literal)
    tests = render("test_rewrites.py.j2", header=header(TESTS, SPEC), rules=rules, literal=literal)
    return {PATH: text, TESTS: tests}
