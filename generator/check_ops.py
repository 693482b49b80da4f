"""Checks the operator entries against torch's schemas and types every expression; the result is what the emitters print.

Rules of the language are in `docs/spec-language.md`; the keys of each kind are the table `KINDS`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from .diagnostics import Diagnostics, did_you_mean, one_of
from .expr.infer import Function, Inference, Scope, bound_names, describe
from .expr.ops import Names, ScalarSig, argument_types, callable_here, result_type
from .expr.parse import Text, parse_body, parse_expression
from .expr.printer import As
from .expr.types import DTYPE, DTYPE_NAMES, ELEM, INDEX, INT, TENSOR, Type, accepts, join, list_of, optional, strip
from .load import Document, Entry
from .model import Model
from .torch_schemas import TorchSchema

COMMON = ("op", "doc", "kind", "symbol", "native_if", "let", "tests", "test_dtypes", "unspecified")
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "pointwise": (("expr",), ("operands", "promoted", "promote", "compute", "dtype", "with")),
    "view": (("shape", "at"), ("dtype", "with")),
    "gather": (("shape", "at"), ("dtype", "with")),
    "create": (("shape", "at"), ("dtype", "with")),
    "reduction": (("shape", "over", "reduce", "at"), ("dtype", "with", "finish")),
    "scan": (("shape", "scan", "dim", "at"), ("dtype", "with")),
    "scatter": (("base", "over", "at", "into"), ("mode", "when", "with")),
    "composite": (("body",), ()),
    "extern": (("why",), ()),
}
"""Kind → keys that it needs, keys that it may have (beside `COMMON`)."""
PROMOTE = ("default", "float", "bool", "first", "none")
WANTED: dict[str, Type] = {
    "shape": list_of(INDEX), "over": list_of(INDEX), "into": list_of(INDEX), "at": ELEM, "when": ELEM, "finish": ELEM, "dim": INT,
    "dtype": DTYPE, "base": TENSOR,
}  # fmt: skip
_ELEMS = ("expr", "at", "when", "finish", "with")


@dataclass(frozen=True)
class Section:
    """A checked expression (or a body) and how its nodes print."""

    tree: ast.expr | list[ast.stmt]
    resolved: dict[ast.AST, As]
    text: str = ""


@dataclass
class Lowering:
    """One overload's function, checked: everything that the printer needs."""

    schema: TorchSchema
    function: Function
    sections: dict[str, Section] = field(default_factory=dict)
    lets: list[tuple[str, Section]] = field(default_factory=list)
    withs: list[tuple[str, Section]] = field(default_factory=list)
    cases: list[tuple[Section | None, Section]] = field(default_factory=list)
    promoted: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    words: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OpEntry:
    """One entry: the overloads that it covers, and their functions (none for an extern)."""

    id: str
    doc: str
    kind: str
    family: str
    symbol: str
    schemas: tuple[TorchSchema, ...]
    lowerings: tuple[Lowering, ...]
    tests: tuple[str, ...]
    test_dtypes: tuple[str, ...]
    unspecified: bool
    why: str


def build(doc: Document, model: Model, diags: Diagnostics) -> tuple[OpEntry, ...]:
    """Every entry, checked. Mistakes go to `diags`; entries that have some are left out."""
    names = known_names(model)
    names.incomplete = any(m.pos.source in doc.sources for m in diags.mistakes)
    covered = _coverage(doc, model, diags)
    for entry, schemas in covered:
        if entry.get("kind") != "extern":
            for s in schemas:
                names.native[s.id] = str(entry.get("kind"))
                if s.namespace not in names.namespaces:
                    names.namespaces += (s.namespace,)
        _symbol(entry, schemas, names, diags)
    out = []
    for entry, schemas in covered:
        before = len(diags.mistakes)
        made = _Checker(entry, schemas, names, diags).run()
        if made is not None and len(diags.mistakes) == before:
            out.append(made)
    return tuple(out)


def known_names(model: Model) -> Names:
    """Scalars and reductions of the scalar spec, and the operators of the base model when there is one."""
    entries = [*(model.base.entries("scalars") if model.base else ()), *model.entries("scalars")]
    scalars = {
        e.id: ScalarSig(e.id, len(e.get("args") or ()), e.get("result") == "attr") for e in entries if e.tag == "scalar"
    }
    names = Names(
        model.torch,
        scalars,
        frozenset(e.id for e in entries if e.tag == "reduction"),
        frozenset(e.id for e in entries if e.tag == "scan"),
    )
    for op in model.base.part("ops") if model.base else ():
        names.native |= {w.schema.id: op.kind for w in op.lowerings}
        if op.symbol:
            names.symbols[op.symbol] = symbol_overload(op.schemas)
    return names


def symbol_overload(schemas: tuple[TorchSchema, ...]) -> str:
    """The overload that an entry's `symbol` means: `Tensor`, else `default`, else the first."""
    order = {"Tensor": 0, "default": 1}
    return min(schemas, key=lambda s: (order.get(s.overload, 2), s.overload)).id


def op_names(entry: Entry) -> list[str]:
    """What `op:` names: one operator or a list."""
    value = entry.get("op")
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


# -- which overloads ---------------------------------------------------------------------------------------------------
def _coverage(doc: Document, model: Model, diags: Diagnostics) -> list[tuple[Entry, tuple[TorchSchema, ...]]]:
    owner: dict[str, Entry] = {}
    packets: dict[str, Entry] = {}
    for entry in doc:
        for k, name in enumerate(op_names(entry)):
            table = packets if name.count(".") == 1 else owner
            first = table.setdefault(name, entry)
            if first is not entry or op_names(entry).index(name) != k:
                diags.error(
                    _op_pos(entry, k), f"'{name}' is covered twice", also=[(first.pos("op"), "the first one is here")]
                )
    out = []
    for entry in doc:
        schemas: list[TorchSchema] = []
        for k, name in enumerate(op_names(entry)):
            found = model.torch.get(name)
            if not found:
                _unknown_op(entry, k, name, model, diags)
                continue
            fit = [s for s in found if callable_here(s) or (entry.get("kind") == "extern" and not s.is_out)]
            if not fit:
                diags.error(
                    _op_pos(entry, k),
                    f"'{name}' has no overload that a graph can hold: each writes to an argument or returns no tensor",
                )
            schemas += [s for s in fit if name.count(".") == 2 or s.id not in owner]
        out.append((entry, tuple(sorted(schemas, key=lambda s: s.id))))
    return out


def _op_pos(entry: Entry, k: int) -> Any:
    return entry.pos("op", k) if isinstance(entry.get("op"), list) else entry.pos("op")


def _unknown_op(entry: Entry, k: int, name: str, model: Model, diags: Diagnostics) -> None:
    parts = name.split(".")
    if len(parts) not in (2, 3):
        diags.error(_op_pos(entry, k), f"expected an operator as in 'aten.add' or 'aten.add.Tensor', found '{name}'")
        return
    packet = ".".join(parts[:2])
    overloads = [s.overload for s in model.torch.get(packet)]
    if overloads:
        text = f"'{packet}' has no overload '{parts[2]}'{did_you_mean(parts[2], overloads)}; it has {one_of(overloads)}"
        diags.error(_op_pos(entry, k), text)
    else:
        hint = did_you_mean(packet, model.torch.packets())
        if not any(p.startswith(parts[0] + ".") for p in model.torch.packets()):
            hint = f"; if it is your own, import the module that registers it (--import){hint}"
        diags.error(_op_pos(entry, k), f"torch has no operator '{packet}'{hint}")


def _symbol(entry: Entry, schemas: tuple[TorchSchema, ...], names: Names, diags: Diagnostics) -> None:
    symbol = entry.get("symbol")
    if symbol is None or not schemas:
        return
    if symbol in names.symbols:
        diags.error(entry.pos("symbol"), f"the symbol '{symbol}' means '{names.symbols[symbol]}' already")
    names.symbols.setdefault(str(symbol), symbol_overload(schemas))


# -- one entry ---------------------------------------------------------------------------------------------------------
class _Checker:
    def __init__(self, entry: Entry, schemas: tuple[TorchSchema, ...], names: Names, diags: Diagnostics) -> None:
        self.entry, self.schemas, self.names, self.diags = entry, schemas, names, diags
        self.kind = str(entry.get("kind"))
        self.trees: dict[tuple[str | int, ...], Any] = {}

    def run(self) -> OpEntry | None:
        """The entry, or None after mistakes that leave nothing to check."""
        entry = self.entry
        if not self.keys():
            return None
        self.parse_all()
        lowerings: list[Lowering] = []
        if self.kind != "extern":
            for schema in self.schemas:
                lowerings.append(_Overload(self, schema).check())
        return OpEntry(
            id=", ".join(op_names(entry)),
            doc=str(entry.get("doc")),
            kind=self.kind,
            family=entry.family,
            symbol=str(entry.get("symbol") or ""),
            schemas=self.schemas,
            lowerings=tuple(lowerings),
            tests=tuple(map(str, entry.get("tests") or ())),
            test_dtypes=tuple(map(str, entry.get("test_dtypes") or ())),
            unspecified=bool(entry.get("unspecified")),
            why=str(entry.get("why") or ""),
        )

    def error(self, path: tuple[str | int, ...], message: str) -> None:
        self.diags.error(self.entry.pos(*path), message)

    def keys(self) -> bool:
        """Whether the keys are those of the kind."""
        entry = self.entry
        if self.kind not in KINDS:
            if "kind" in entry:
                self.error(
                    ("kind",), f"unknown kind '{self.kind}'{did_you_mean(self.kind, KINDS)}; expected {one_of(KINDS)}"
                )
            else:
                self.diags.error(entry.pos("op"), f"'{entry.id}' has no 'kind': expected {one_of(KINDS)}")
            return False
        needed, may = KINDS[self.kind]
        before = len(self.diags.mistakes)
        for key in entry.data:
            if key not in (*COMMON, *needed, *may):
                elsewhere = [k for k, (n, m) in KINDS.items() if key in (*n, *m)]
                hint = (
                    f" (it belongs to {one_of(elsewhere)})"
                    if elsewhere
                    else did_you_mean(key, (*COMMON, *needed, *may))
                )
                self.diags.error(entry.key_pos(key), f"unknown key '{key}' for kind '{self.kind}'{hint}")
        for key in ("doc", *needed):
            if entry.get(key) is None:
                self.diags.error(entry.pos("op"), f"'{entry.id}' has no '{key}', which kind '{self.kind}' needs")
        for key, allowed in (("promote", PROMOTE), ("compute", ("same", *DTYPE_NAMES))):
            if key in entry and entry[key] not in allowed:
                self.error(
                    (key,), f"expected {one_of(allowed)}, found '{entry[key]}'{did_you_mean(entry[key], allowed)}"
                )
        for key, table in (("reduce", self.names.reductions), ("scan", self.names.scans)):
            if key in entry and key in needed and entry[key] not in table:
                self.error(
                    (key,),
                    f"no {'reduction' if key == 'reduce' else 'scan'} '{entry[key]}'"
                    f"{did_you_mean(entry[key], table)}; there are {one_of(sorted(table))}",
                )
        for k, name in enumerate(entry.get("test_dtypes") or ()):
            if name not in DTYPE_NAMES:
                self.error(("test_dtypes", k), f"expected a dtype, found '{name}'{did_you_mean(name, DTYPE_NAMES)}")
        return len(self.diags.mistakes) == before

    # -- parsing -------------------------------------------------------------------------------------------------------
    def parse_all(self) -> None:
        """Parse every expression of the entry once."""
        entry = self.entry
        for key in ("native_if", "shape", "over", "dim", "dtype", "into", "when", "at", "finish", "base", "mode"):
            if key in entry:
                self.parse((key,), word=key in ("dtype", "mode"))
        for key in ("let", "with"):
            lets = entry.get(key)
            if lets is not None and not isinstance(lets, dict):
                self.error((key,), "expected names with their expressions ('n: size(self, dim)'), found something else")
            for name in lets if isinstance(lets, dict) else ():
                if not name.isidentifier():
                    self.diags.error(entry.key_pos(key, name), f"expected a name, found '{name}'")
                self.parse((key, name))
        if "body" in entry:
            self.parse(("body",), body=True)
        expr = entry.get("expr")
        if isinstance(expr, list):
            self.parse_cases(expr)
        elif expr is not None:
            self.parse(("expr",))

    def parse_cases(self, cases: list[Any]) -> None:
        for k, case in enumerate(cases):
            if not isinstance(case, dict) or not set(case) <= {"if", "is"} or "is" not in case:
                self.error(("expr", k), "expected {if: condition, is: expression}, the last without 'if'")
                continue
            last = k == len(cases) - 1
            if ("if" in case) == last:
                self.error(
                    ("expr", k),
                    "the last case has no 'if': it is what remains" if last else "only the last case may lack 'if'",
                )
            if "if" in case:
                self.parse(("expr", k, "if"))
            self.parse(("expr", k, "is"))

    def parse(self, path: tuple[str | int, ...], *, body: bool = False, word: bool = False) -> None:
        source = self.text(path)
        if source is None:
            return
        if word and source.text in (*DTYPE_NAMES, "set", *self.names.reductions):
            self.trees[path] = ast.Constant(
                value=source.text, lineno=1, col_offset=0, end_lineno=1, end_col_offset=len(source.text)
            )
        else:
            self.trees[path] = parse_body(source) if body else parse_expression(source)

    def text(self, path: tuple[str | int, ...], note: str = "") -> Text | None:
        """The string at `path`; plain numbers and booleans count as their Python text."""
        value: Any = self.entry.data
        for part in path:
            value = value[part]
        if isinstance(value, list):
            self.error(path, 'expected an expression; a list of expressions is written in quotes, as in "[n, 1]"')
            return None
        if isinstance(value, dict) or value is None:
            self.error(path, "expected an expression")
            return None
        return Text(self.entry, path, value if isinstance(value, str) else repr(value), self.diags, note)


class _Overload:
    """Types the expressions of an entry for one overload."""

    def __init__(self, checker: _Checker, schema: TorchSchema) -> None:
        self.checker, self.entry, self.schema = checker, checker.entry, schema
        trees = [t for v in checker.trees.values() if v for t in (v if isinstance(v, list) else [v])]
        lets = [n for key in ("let", "with") for n in self.mapping(key)]
        arguments = frozenset(a.name for a in schema.args)
        self.function = Function(checker.names, arguments, arguments | set(lets) | bound_names(*trees))
        self.made = Lowering(schema, self.function)
        self.note = f" (in overload '{schema.overload}')" if len(checker.schemas) > 1 else ""

    def check(self) -> Lowering:
        """All expressions of the entry."""
        entry, kind = self.entry, self.checker.kind
        self.made.words = {k: str(entry[k]) for k in ("promote", "compute", "reduce", "scan") if k in entry}
        scope: Scope = argument_types(self.schema)
        if ("native_if",) in self.checker.trees:
            scope = self.condition(("native_if",), scope, self.made.sections)
        scope = self.assigned("let", scope, self.made.lets)
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
        self.checker.error(path, message + self.note)

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
        tree = self.checker.trees.get(path)
        source = self.checker.text(path, self.note) if tree is not None else None
        if tree is None or source is None:
            return None, Type("any")
        resolved: dict[ast.AST, As] = {}
        check = Inference(source, self.function, resolved, elems=path[0] in _ELEMS and path[-1] != "if", fixed=fixed)
        t = check.infer(tree, scope) if want is None else check.expect(tree, scope, want)
        return Section(tree, resolved, source.text), t

    def condition(
        self, path: tuple[str | int, ...], scope: Scope, into: dict[str, Section], fixed: dict[str, str] | None = None
    ) -> Scope:
        """Check a condition; the scope where it holds."""
        tree = self.checker.trees.get(path)
        source = self.checker.text(path, self.note) if tree is not None else None
        if tree is None or source is None:
            return scope
        resolved: dict[ast.AST, As] = {}
        check = Inference(source, self.function, resolved, fixed=fixed)
        check.condition(tree, scope)
        into[str(path[-1])] = Section(tree, resolved, " ".join(source.text.split()))
        return check.narrowed(tree, scope, True)

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
        if ("dtype",) in self.checker.trees:
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
            tree = self.checker.trees.get(("expr", k, "if"))
            if tree is not None:
                where = self.condition(("expr", k, "if"), inner, found, fixed)
            section, _ = self.section(("expr", k, "is"), where, ELEM, fixed)
            if section:
                self.made.cases.append((found.get("if"), section))
            if tree is not None:
                source = self.checker.text(("expr", k, "if"))
                assert source is not None
                inner = dict(Inference(source, self.function, {}).narrowed(tree, inner, False))

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
        also = {a.name for s in self.checker.schemas for a in s.args if a.type.rstrip("?") == "Tensor"}
        return [
            a.name for a in self.schema.args
            if strip(scope[a.name]).kind == "tensor" or (a.name in also and strip(scope[a.name]).kind == "number")
        ]  # fmt: skip

    def define(self, scope: Scope) -> None:
        """Every kind that defines elements at coordinates."""
        kind, entry = self.checker.kind, self.entry
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
            if "dtype" not in entry:
                self.error(
                    ("finish",), "'finish' needs a 'dtype': the reduced value has the type that it was accumulated in"
                )
            self.keep("finish", {**scope, "i": coords, "out": coords, "value": ELEM}, fixed)
        if ("mode",) in self.checker.trees:
            section, _ = self.section(("mode",), scope, Type("str"))
            if section:
                self.made.sections["mode"] = section

    def keep(self, key: str, scope: Scope, fixed: dict[str, str]) -> None:
        if (key,) in self.checker.trees:
            section, _ = self.section((key,), scope, WANTED[key], fixed)
            if section:
                self.made.sections[key] = section

    # -- composite -----------------------------------------------------------------------------------------------------
    def body(self, scope: Scope) -> None:
        """The statements; every path must return what torch's schema returns."""
        tree = self.checker.trees.get(("body",))
        source = self.checker.text(("body",), self.note) if tree else None
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
                yes, a = self.block(node.body, dict(check.narrowed(node.test, scope, True)), check)
                no, b = self.block(node.orelse, dict(check.narrowed(node.test, scope, False)), check)
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
