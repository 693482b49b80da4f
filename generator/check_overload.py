"""Types the expressions of an operator entry for one of its overloads, and keeps what the printer needs."""

from __future__ import annotations

import ast
from typing import Any

from .diagnostics import did_you_mean
from .entry_texts import EntryTexts
from .expr.function import Function, Scope
from .expr.infer import Inference
from .expr.narrow import narrowed
from .expr.ops import argument_types, result_type
from .expr.printer import As, print_expression
from .expr.types import DTYPE, ELEM, INDEX, INT, TENSOR, Type, accepts, describe, join, list_of, optional, strip
from .op_entries import Lowering, Section
from .requirements import clauses, paths
from .torch_schemas import TorchSchema

WANTED: dict[str, Type] = {
    "shape": list_of(INDEX), "over": list_of(INDEX), "into": list_of(INDEX), "at": ELEM, "when": ELEM, "finish": ELEM, "dim": INT,
    "dtype": DTYPE, "base": TENSOR,
}  # fmt: skip
_ELEMS = ("expr", "at", "when", "finish", "with")


class Overload:
    """Types the expressions of an entry for one overload."""

    def __init__(self, texts: EntryTexts, schema: TorchSchema) -> None:
        self.texts, self.entry, self.schema = texts, texts.entry, schema
        lets = [n for key in ("let", "with") for n in self.mapping(key)]
        arguments = frozenset(a.name for a in schema.args)
        self.function = Function(texts.names, arguments, arguments | set(lets) | texts.stored)
        self.made = Lowering(schema, self.function)
        self.note = f" (in overload '{schema.overload}')" if len(texts.schemas) > 1 else ""

    def check(self) -> Lowering:
        """All expressions of the entry."""
        entry, kind = self.entry, self.texts.kind
        self.made.words = {k: str(entry[k]) for k in ("promote", "compute", "reduce", "scan") if k in entry}
        # Values stand in the trees already: their names are there for who misspells one.
        scope: Scope = {**dict.fromkeys(self.texts.values, Type("any")), **argument_types(self.schema)}
        scope = self.require(scope)
        if ("native_if",) in self.texts.trees:
            scope = self.condition(("native_if",), scope, self.made.sections)
        self.require_each(scope)
        scope = self.assigned("let", scope, self.made.lets)
        if ("raises",) in self.texts.trees:
            section, _ = self.section(("raises",), scope, Type("str"))
            if section:
                self.made.sections["raises"] = section
        if kind == "composite":
            self.body(scope)
        else:
            returns = [r.type for r in self.schema.returns]
            if returns != ["Tensor"]:
                text = self.schema.text.rpartition(" -> ")[2]
                self.error(
                    ("op",), f"kind '{kind}' defines one tensor; '{self.schema.id}' returns {text}: use 'composite'"
                )
            elif kind == "pointwise":
                self.pointwise(scope)
            else:
                self.define(scope)
        return self.made

    def error(self, path: tuple[str | int, ...], message: str) -> None:
        self.texts.error(path, message + self.note)

    def mapping(self, key: str) -> dict[str, Any]:
        """The names under `let` or `with`; none when that is no mapping (which was reported)."""
        value = self.entry.get(key)
        return value if isinstance(value, dict) else {}

    def assigned(
        self, key: str, scope: Scope, into: list[tuple[str, Section]], fixed: dict[str, str] | None = None
    ) -> Scope:
        """Check the names under `let` or `with`, in order; the scope with them."""
        for name in self.mapping(key):
            section, t = self.section((key, name), scope, None, fixed)
            if section is not None:
                into.append((self.function.printed(name), section))
            scope = {**scope, name: t}
        return scope

    def section(
        self, path: tuple[str | int, ...], scope: Scope, want: Type | None = None, fixed: dict[str, str] | None = None
    ) -> tuple[Section | None, Type]:
        """Check one expression; its type is `any` when it did not even parse."""
        tree = self.texts.trees.get(path)
        source = self.texts.text(path, self.note) if tree is not None else None
        if tree is None or source is None:
            return None, Type("any")
        resolved: dict[ast.AST, As] = {}
        elems = (path[0] in _ELEMS and path[-1] != "if") or "each" in path
        check = Inference(source, self.function, resolved, elems=elems, fixed=fixed)
        t = check.infer(tree, scope) if want is None else check.expect(tree, scope, want)
        return Section(tree, resolved, source.text), t

    def condition(
        self, path: tuple[str | int, ...], scope: Scope, into: dict[str, Section], fixed: dict[str, str] | None = None
    ) -> Scope:
        """Check a condition; the scope where it holds."""
        tree = self.texts.trees.get(path)
        source = self.texts.text(path, self.note) if tree is not None else None
        if tree is None or source is None:
            return scope
        resolved: dict[ast.AST, As] = {}
        check = Inference(source, self.function, resolved, fixed=fixed)
        check.condition(tree, scope)
        text = print_expression(tree) if path in self.texts.filled else " ".join(source.text.split())
        into[str(path[-1])] = Section(tree, resolved, text)
        return narrowed(tree, scope, True)

    def require(self, scope: Scope) -> Scope:
        """Type the conditions that are decided while lowering; the scope where they hold."""
        for path in paths(self.entry):
            if path[2] != "that":
                continue
            found: dict[str, Section] = {}
            scope = self.condition(path, scope, found)
            self.made.required += found.values()
        return scope

    def require_each(self, scope: Scope) -> None:
        """Type the conditions of elements, by the arguments that have them."""
        fixed = {"value": self.function.local("value")}
        for path in paths(self.entry):
            if path[2] != "each":
                continue
            name, clause = str(path[3]), clauses(self.entry)[int(path[1])]
            if name not in {a.name for a in self.schema.args}:
                arguments = [a.name for a in self.schema.args if a.type.rstrip("?") == "Tensor"]
                self.error(path[:3], f"'{self.schema.id}' has no argument '{name}'{did_you_mean(name, arguments)}")
            elif strip(scope[name]).kind != "tensor":
                self.error(path[:3], f"'{name}' is {describe(scope[name])}: 'each' is of the elements of a tensor")
            # Where the argument is None nothing is asked.
            given = {name: strip(scope[name])} if name in scope else {}
            section, _ = self.section(path, {**scope, **given, "value": ELEM}, ELEM, fixed)
            if section is not None:
                printed = self.function.printed(name)
                self.made.each.append((printed, section, str(clause["raises"]), str(clause["says"])))

    # -- kinds ---------------------------------------------------------------------------------------------------------
    def pointwise(self, scope: Scope) -> None:
        """Operands become elems; then the cases."""
        operands = self.named("operands", scope) if "operands" in self.entry else self.default_operands(scope)
        promoted = [n for n in self.named("promoted", scope) if n in operands] if "promoted" in self.entry else operands
        if not any(strip(scope[n]).kind in ("tensor", "any") for n in operands):
            self.error(("op",), f"a pointwise entry needs a tensor operand; '{self.schema.id}' has none")
        self.made.promoted = tuple(promoted)
        self.made.plain = tuple(n for n in operands if n not in promoted)
        fixed = {"common": f"{self.function.local('p')}.common"} if "common" not in scope else {}
        inner = {**scope, **{n: optional(ELEM) if scope[n].kind == "optional" else ELEM for n in operands}}
        inner.setdefault("common", DTYPE)
        if ("dtype",) in self.texts.trees:
            section, _ = self.section(("dtype",), {**scope, "common": DTYPE}, DTYPE, fixed)
            if section:
                self.made.sections["dtype"] = section
        inner = dict(self.assigned("with", inner, self.made.withs, fixed))
        cases = self.entry["expr"]
        if not isinstance(cases, list):
            section, _ = self.section(("expr",), inner, ELEM, fixed)
            self.made.cases = [(None, section)] if section else []
            return
        for k in range(len(cases)):
            found: dict[str, Section] = {}
            where: Scope = inner
            tree = self.texts.trees.get(("expr", k, "if"))
            if tree is not None:
                where = self.condition(("expr", k, "if"), inner, found, fixed)
            section, _ = self.section(("expr", k, "is"), where, ELEM, fixed)
            if section:
                self.made.cases.append((found.get("if"), section))
            if tree is not None:
                inner = dict(narrowed(tree, inner, False))

    def named(self, key: str, scope: Scope) -> list[str]:
        """A list of operand names under a key."""
        value = self.entry[key]
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            self.error((key,), "expected a list of names")
            return []
        out = []
        for k, name in enumerate(value):
            if name not in scope:
                self.error((key, k), f"unknown name '{name}'{did_you_mean(name, scope)}")
            elif strip(scope[name]).kind not in ("tensor", "number", "index", "int", "bool", "elem", "any"):
                self.error((key, k), f"'{name}' is {describe(scope[name])}: an operand is a tensor or a number")
            else:
                out.append(name)
        return out

    def default_operands(self, scope: Scope) -> list[str]:
        """Tensors, and the scalars that are tensors in a sibling overload."""
        also = {a.name for s in self.texts.schemas for a in s.args if a.type.rstrip("?") == "Tensor"}
        return [
            a.name for a in self.schema.args
            if strip(scope[a.name]).kind == "tensor" or (a.name in also and strip(scope[a.name]).kind == "number")
        ]  # fmt: skip

    def define(self, scope: Scope) -> None:
        """Every kind that defines elements at coordinates."""
        kind, entry = self.texts.kind, self.entry
        coords = list_of(INDEX)
        fixed = {n: self.function.local(n) for n in ("i", "r", "out", "value")}
        inner: dict[str, Type] = dict(scope)
        for key in ("shape", "over", "dim", "dtype", "base"):
            self.keep(key, scope, {})
        if kind != "scatter":
            inner |= {"i": coords, "out": coords}
        if kind in ("reduction", "scatter"):
            inner["r"] = coords
        inner = dict(self.assigned("with", inner, self.made.withs, fixed))
        for key in ("at", "into", "when"):
            self.keep(key, inner, fixed)
        if "finish" in entry:
            if "dtype" not in entry and kind != "scatter":
                self.error(
                    ("finish",), "'finish' needs a 'dtype': the reduced value has the type that it was accumulated in"
                )
            shaped = {} if kind == "scatter" else {"out": coords}
            self.keep("finish", {**scope, **shaped, "i": coords, "value": ELEM}, fixed)
        if ("mode",) in self.texts.trees:
            section, _ = self.section(("mode",), scope, Type("str"))
            if section:
                self.made.sections["mode"] = section

    def keep(self, key: str, scope: Scope, fixed: dict[str, str]) -> None:
        if (key,) in self.texts.trees:
            section, _ = self.section((key,), scope, WANTED[key], fixed)
            if section:
                self.made.sections[key] = section

    # -- composite -----------------------------------------------------------------------------------------------------
    def body(self, scope: Scope) -> None:
        """The statements; every path must return what torch's schema returns."""
        tree = self.texts.trees.get(("body",))
        source = self.texts.text(("body",), self.note) if tree else None
        if not tree or source is None:
            return
        resolved: dict[ast.AST, As] = {}
        check = Inference(source, self.function, resolved)
        done, _ = self.block(tree, dict(scope), check)
        if not done:
            check.error(tree[-1], "a path through the body ends without 'return'")
        self.made.sections["body"] = Section(tree, resolved)

    def block(
        self, statements: list[ast.stmt], scope: dict[str, Type], check: Inference
    ) -> tuple[bool, dict[str, Type]]:
        """Whether the statements always return, and the scope after them."""
        for k, node in enumerate(statements):
            done = False
            if isinstance(node, ast.Assign):
                scope |= check.bind(node.targets[0], check.infer(node.value, scope))
            elif isinstance(node, ast.Return):
                self.returned(node, scope, check)
                done = True
            else:
                assert isinstance(node, ast.If)
                check.condition(node.test, scope)
                yes, a = self.block(node.body, dict(narrowed(node.test, scope, True)), check)
                no, b = self.block(node.orelse, dict(narrowed(node.test, scope, False)), check)
                done = yes and no
                scope = b if yes else a if no else {n: join(a[n], b[n]) for n in a if n in b}
            if done:
                if k + 1 < len(statements):
                    check.error(statements[k + 1], "never reached: everything before it returns")
                return True, scope
        return False, scope

    def returned(self, node: ast.Return, scope: Scope, check: Inference) -> None:
        want = result_type(self.schema)
        if node.value is None:
            check.error(node, f"'{self.schema.id}' returns {describe(want)}")
            return
        if isinstance(node.value, ast.Tuple) and want.kind == "tuple" and len(node.value.elts) != len(want.items):
            check.error(
                node.value, f"'{self.schema.id}' returns {len(want.items)} values, found {len(node.value.elts)}"
            )
            return
        have = check.infer(node.value, scope)
        if not accepts(want, have):
            check.error(node.value, f"'{self.schema.id}' returns {describe(want)}, found {describe(have)}")
