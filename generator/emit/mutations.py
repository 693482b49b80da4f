"""Reads specs/mutations.yaml and specs/decompositions.yaml, writes generated/schemas.py (enums, structs),
generated/dispatch_tables.py (tables, roles, inverses of views), generated/wrapper_steps.py and
generated/decompositions.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..diagnostics import Diagnostics, did_you_mean, one_of
from ..load import Document, Entry
from ..model import Model
from ..render import header, literal, render
from ..tables import Table, build_table
from ..torch_schemas import TorchSchema

SPEC = "specs/mutations.yaml"
DECOMPOSITIONS_SPEC = "specs/decompositions.yaml"
HELPERS = ("reshape", "size_of", "dtype_of", "total", "inverse_permutation")
_BUILTINS = ("len", "sum", "all", "any", "range", "tuple", "enumerate", "None", "True", "False")
_TYPES = ("int", "str", "bool", "float", "tuple", "None")


@dataclass(frozen=True)
class StructSpec:
    """One dataclass: fields and derived fields as (name, type, doc, default or expression), invariants as (condition,
    message).
    """

    name: str
    doc: str
    fields: tuple[tuple[str, str, str, str | None], ...]
    derived: tuple[tuple[str, str, str, str], ...]
    invariants: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class StepSpec:
    """One line of a wrapper."""

    name: str
    doc: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    code: str


@dataclass(frozen=True)
class InverseSpec:
    """How a write to the view `op` gets into its base: parameters and body, printed."""

    op: str
    doc: str
    function: str
    parameters: str
    body: str


@dataclass(frozen=True)
class DecompositionSpec:
    """A replacement while tracing: parameters, and lines of the body."""

    op: str
    doc: str
    function: str
    parameters: str
    when: str
    cases: tuple[tuple[str, str], ...]
    called: str = ""  # the function that programs call, where that is what is replaced


@dataclass(frozen=True)
class CorrectionSpec:
    """What a fake kernel says wrongly: (result, arguments that have its dtype, whether it is float32 for half precision, what its
    layout follows and the arguments that say it).
    """

    op: str
    doc: str
    rules: tuple[tuple[int, tuple[int, ...], bool, str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class RefusalSpec:
    """Calls that a fake kernel accepts by mistake: `rules` holds positions of arguments under the names that the specs give them, `fills` is
    the view whose sizes the second argument must have, `wide` takes float32 beside a first argument of half precision.
    """

    op: str
    doc: str
    rules: tuple[tuple[str, tuple[int, ...]], ...]
    fills: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Mutations:
    """The whole of mutations.yaml, checked."""

    enums: tuple[Entry, ...]
    structs: tuple[StructSpec, ...]
    tables: tuple[Table, ...]
    steps: tuple[StepSpec, ...]
    roles: tuple[Entry, ...]
    inverses: tuple[InverseSpec, ...]


def build(doc: Document, model: Model, diags: Diagnostics) -> Mutations:
    """Check everything: names, operators, that tables are total and unambiguous, that steps declare what their code
    uses.
    """
    enums = doc.tagged("enum")
    members = {e.id: tuple(e["members"]) for e in enums}
    steps = tuple(s for e in doc.tagged("step") if (s := _step(e, diags)) is not None)
    names = {*members, *(e.id for e in doc.tagged("struct"))}
    structs = tuple(_struct(e, names, members, diags) for e in doc.tagged("struct"))
    step_names = tuple(e.id for e in doc.tagged("step"))
    tables = tuple(t for e in doc.tagged("table") if (t := build_table(e, members, step_names, diags)) is not None)
    for e in doc.tagged("role"):
        _overload(e, "op", model, diags)
    inverses = tuple(i for e in doc.tagged("inverse") if (i := _inverse(e, model, diags)) is not None)
    return Mutations(enums, structs, tables, steps, doc.tagged("role"), inverses)


def _step(entry: Entry, diags: Diagnostics) -> StepSpec | None:
    code = entry["code"]
    used = set(re.findall(r"\{(\w+)\}", code))
    declared = {*entry["reads"], *entry["writes"]}
    for name in sorted(used - declared):
        diags.error(
            entry.pos("code", at=code.index("{" + name)),
            f"'{name}' is used but neither read nor written{did_you_mean(name, declared)}",
        )
    for name in sorted(declared - used):
        diags.error(
            entry.pos("reads" if name in entry["reads"] else "writes"),
            f"'{name}' is declared but the code does not use it",
        )
    try:
        ast.parse(re.sub(r"\{(\w+)\}", r"\1", code))
    except SyntaxError as e:
        diags.error(entry.pos("code"), f"expected a Python statement: {e.msg}")
        return None
    return StepSpec(entry.id, entry["doc"], tuple(entry["reads"]), tuple(entry["writes"]), code)


def _field_default(
    entry: Entry, name: str, f: Mapping[str, Any], members: dict[str, tuple[str, ...]], diags: Diagnostics
) -> str | None:
    """The printed default of a field: a member where the field is an enum, else the literal."""
    if "default" not in f:
        return None
    value, choices = f["default"], members.get(f["type"])
    if choices is None:
        return literal(value)
    if value not in choices:
        near = did_you_mean(str(value), choices)
        diags.error(entry.pos("fields", name, "default"), f"'{value}' is not a member of {f['type']}{near}")
    return f"{f['type']}.{value}"


def _struct(entry: Entry, names: set[str], members: dict[str, tuple[str, ...]], diags: Diagnostics) -> StructSpec:
    fields, derived, invariants = [], [], []
    for name, f in entry["fields"].items():
        _check_names(entry, ("fields", name, "type"), f["type"], {*_TYPES, *names}, {}, diags)
        fields.append((name, f["type"], f["doc"], _field_default(entry, name, f, members, diags)))
    known = set(entry["fields"])
    for name, d in (entry.get("derived") or {}).items():
        _check_names(entry, ("derived", name, "is"), d["is"], {*known, *_BUILTINS}, members, diags)
        derived.append((name, d["type"], d["doc"], _self(d["is"], known)))
        known.add(name)
    for k, i in enumerate(entry.get("invariants") or ()):
        _check_names(entry, ("invariants", k, "that"), i["that"], {*known, *_BUILTINS}, members, diags)
        invariants.append((_self(i["that"], known), i["say"]))
    return StructSpec(entry.id, entry["doc"], tuple(fields), tuple(derived), tuple(invariants))


def _check_names(
    entry: Entry,
    path: tuple[str | int, ...],
    text: str,
    allowed: set[str],
    enums: dict[str, tuple[str, ...]],
    diags: Diagnostics,
) -> None:
    """Every name in an expression is known, or bound by a comprehension in it; members are members."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as e:
        diags.error(entry.pos(*path, at=max(0, (e.offset or 1) - 1)), f"expected an expression: {e.msg}")
        return
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in enums:
            if node.attr not in enums[node.value.id]:
                valid = enums[node.value.id]
                diags.error(
                    entry.pos(*path, at=node.col_offset),
                    f"expected {one_of(valid)}, found '{node.attr}'{did_you_mean(node.attr, valid)}",
                )
        elif isinstance(node, ast.Name) and node.id not in allowed | bound | set(enums):
            diags.error(
                entry.pos(*path, at=node.col_offset),
                f"unknown name '{node.id}'{did_you_mean(node.id, allowed | set(enums))}",
            )


class _ToSelf(ast.NodeTransformer):
    def __init__(self, fields: set[str]) -> None:
        self.fields = fields

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.fields and isinstance(node.ctx, ast.Load):
            return ast.Attribute(ast.Name("self", ast.Load()), node.id, ast.Load())
        return node


def _self(text: str, fields: set[str]) -> str:
    try:
        return ast.unparse(_ToSelf(fields).visit(ast.parse(text, mode="eval").body))
    except SyntaxError:
        return text  # reported by _check_names


def _overload(entry: Entry, key: str, model: Model, diags: Diagnostics) -> TorchSchema | None:
    """The one overload that an entry names; `prim` operators are not in torch's registry of schemas."""
    name = entry[key]
    if name.startswith("prim."):
        return None
    found = model.torch.get(name)
    if len(found) != 1 or name.count(".") != 2:
        packet = ".".join(name.split(".")[:2])
        near = [s.id for s in model.torch.overloads(packet)] or list(model.torch.packets())
        diags.error(
            entry.pos(key),
            f"expected an overload of torch, 'namespace.name.overload', found '{name}'{did_you_mean(name, near)}",
        )
        return None
    return found[0]


def _parameters(schema: TorchSchema, taken: tuple[str, ...] = ()) -> tuple[str, dict[str, str]]:
    """Python parameters of an overload with their defaults, and the Python name of each argument (`index_` where
    `index` is taken).
    """
    names = {a.name: a.name + "_" if a.name in taken else a.name for a in schema.args}
    parts, star = [], False
    for a in schema.args:
        if a.kwarg_only and not star:
            parts.append("*")
            star = True
        parts.append(names[a.name] + (f"={_default(a.default)}" if a.default is not None else ""))
    return ", ".join(parts), names


def _default(text: str) -> str:
    if text in ("None", "True", "False") or re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?|\[.*\]", text):
        return text.replace("[", "(").replace("]", ",)").replace("(,)", "()") if text.startswith("[") else text
    return "None"


DTYPES = ("bool", "uint8", "int32", "int64", "float32", "float64")  # that an expression may name


class _Printer:
    """Prints an expression whose calls are aten operators; `operator` says how a call of one is written."""

    def __init__(self, model: Model, names: set[str], operator: str, helpers: tuple[str, ...] = ()) -> None:
        self.model, self.names, self.operator, self.helpers = model, names, operator, helpers

    def show(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                if name in DTYPES and name not in self.names:
                    return f"torch.{name}"
                if name not in self.names:
                    raise _Fault(f"unknown name '{name}'{did_you_mean(name, self.names)}", node.col_offset)
                return name
            case ast.Constant():
                return literal(node.value)
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult(), left=left, right=right):
                sign = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}[type(node.op)]
                return f"({self.show(left)} {sign} {self.show(right)})"
            case ast.Subscript(value=value, slice=ast.Slice(lower=None, upper=ast.expr() as upper, step=None)):
                return f"{self.show(value)}[:{self.show(upper)}]"
            case ast.Subscript(value=value, slice=index):
                return f"{self.show(value)}[{self.show(index)}]"
            case ast.List(elts=elts):
                return f"[{', '.join(map(self.show, elts))}]"
            case ast.Tuple(elts=elts):
                return f"({', '.join(map(self.show, elts))},)"
            case ast.Starred(value=value):
                return f"*{self.show(value)}"
            case ast.Call(func=func, args=args, keywords=keywords):
                return self.call(ast.unparse(func), func.col_offset, args, keywords)
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp():
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Name):
                        self.show(inner)
                return ast.unparse(node)
        raise _Fault(f"'{ast.unparse(node)}' may not stand here", node.col_offset)

    def call(self, name: str, offset: int, args: list[ast.expr], keywords: list[ast.keyword]) -> str:
        shown = [self.show(a) for a in args]
        if name in self.helpers:
            return f"{name}({', '.join(['b', *shown] if name == 'reshape' else shown)})"
        packet, _, overload = name.partition(".")
        found = self.model.torch.get(f"aten.{packet}.{overload or 'default'}")
        if not found:
            near = [n.removeprefix("aten.") for n in self.model.torch.packets()]
            overloads = [s.id.removeprefix("aten.") for s in self.model.torch.overloads(f"aten.{packet}")]
            hint = f"; expected {one_of(overloads)}" if overloads else did_you_mean(name, [*near, *self.helpers])
            raise _Fault(f"unknown operator '{name}'{hint}", offset)
        if keywords and "{args}" not in self.operator:
            raise _Fault(f"'{name}' takes no keyword arguments here", offset)
        named = [f"{k.arg}={self.show(k.value)}" for k in keywords]
        return self.operator.format(
            op=f"torch.ops.{found[0].id}", args=", ".join([*shown, *named]), tuple=", ".join(shown) + ","
        )


class _Fault(Exception):
    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.offset = offset


def _printed(entry: Entry, path: tuple[str | int, ...], text: str, printer: _Printer, diags: Diagnostics) -> str | None:
    try:
        return printer.show(ast.parse(text, mode="eval").body)
    except SyntaxError as e:
        diags.error(entry.pos(*path, at=max(0, (e.offset or 1) - 1)), f"expected an expression: {e.msg}")
    except _Fault as fault:
        diags.error(entry.pos(*path, at=fault.offset), str(fault))
    return None


def _function(op: str) -> str:
    return op.partition(".")[2].removesuffix(".default").replace(".", "_").strip("_")


def _inverse(entry: Entry, model: Model, diags: Diagnostics) -> InverseSpec | None:
    schema = _overload(entry, "inverse", model, diags)
    if schema is None:
        return None
    parameters, names = _parameters(schema, ("base", "value", "index", "b"))
    printer = _Printer(model, {*names.values(), "base", "value", "index"}, "b.dispatch_node({op}, ({tuple}))", HELPERS)
    body = _printed(entry, ("body",), entry["body"], printer, diags)
    if body is None:
        return None
    return InverseSpec(
        entry.id, entry["doc"], "into_" + _function(entry.id), f"b, base, value, index, {parameters}", body
    )


def build_decompositions(
    doc: Document, model: Model, diags: Diagnostics
) -> tuple[tuple[DecompositionSpec, ...], tuple[CorrectionSpec, ...], tuple[RefusalSpec, ...]]:
    """The decompositions, corrections and refusals, checked: operators exist, names are arguments."""
    corrections = [c for e in doc.tagged("correction") if (c := _correction(e, model, diags)) is not None]
    refusals = [r for e in doc.tagged("refusal") if (r := _refusal(e, model, diags)) is not None]
    return _decompositions(doc.tagged("decomposition"), model, diags), tuple(corrections), tuple(refusals)


def _refusal(entry: Entry, model: Model, diags: Diagnostics) -> RefusalSpec | None:
    schema = _overload(entry, "refusal", model, diags)
    if schema is None:
        return None
    names = [a.name for a in schema.args]
    keys = ("same_dtype", "not_floating", "not_bool", "most_dims")
    for path, name in [((key, k), n) for key in keys for k, n in enumerate(entry.get(key, ()))]:
        if not _known_argument(entry, path, name, names, diags):
            return None
    if len(dims := entry.get("most_dims", ())) not in (0, 2):
        diags.error(entry.pos("most_dims"), f"expected two arguments of {entry.id}, found {len(dims)}")
        return None
    if "fills" in entry and _overload(entry, "fills", model, diags) is None:
        return None
    rules = tuple((key, tuple(names.index(n) for n in entry[key])) for key in keys if key in entry)
    return RefusalSpec(entry.id, entry["doc"], rules, entry.get("fills", ""), entry.get("wide", False))


def _known_argument(entry: Entry, path: tuple[str | int, ...], name: str, names: list[str], diags: Diagnostics) -> bool:
    if name not in names:
        message = f"expected an argument of {entry.id}, found '{name}'{did_you_mean(name, names)}"
        diags.error(entry.pos(*path), message)
    return name in names


def _correction(entry: Entry, model: Model, diags: Diagnostics) -> CorrectionSpec | None:
    schema = _overload(entry, "correction", model, diags)
    if schema is None:
        return None
    names = [a.name for a in schema.args]
    rules = []
    for k, rule in enumerate(entry["results"]):
        named: list[tuple[tuple[str | int, ...], str]] = [
            ((key, j), n) for key in ("dtype_of", "elementwise_of") for j, n in enumerate(rule.get(key, ()))
        ]
        named += [(("layout_of",), rule["layout_of"])] if "layout_of" in rule else []
        for path, name in named:
            if not _known_argument(entry, ("results", k, *path), name, names, diags):
                return None
        typed = tuple(names.index(n) for n in rule.get("dtype_of", ()))
        layout = "suggested" if "layout_of" in rule else "elementwise" if "elementwise_of" in rule else ""
        layout = "contiguous" if rule.get("contiguous") else layout
        laid = tuple(
            names.index(n) for n in rule.get("elementwise_of", [rule["layout_of"]] if "layout_of" in rule else ())
        )
        rules.append((rule["result"], typed, rule.get("wide", False), layout, laid))
    return CorrectionSpec(entry.id, entry["doc"], tuple(rules))


def _decompositions(entries: tuple[Entry, ...], model: Model, diags: Diagnostics) -> tuple[DecompositionSpec, ...]:
    out = []
    for entry in entries:
        schema = _overload(entry, "decomposition", model, diags)
        if schema is None:
            continue
        parameters, names = _parameters(schema)
        printer = _Printer(model, set(names.values()), "{op}({args})")
        when = _printed(entry, ("when",), str(entry.get("when", "True")), printer, diags)
        body = entry["body"]
        cases = []
        for k, case in enumerate(body if isinstance(body, list) else [{"is": body}]):
            at: tuple[str | int, ...] = ("body", k) if isinstance(body, list) else ()
            condition = _printed(entry, (*at, "if"), str(case["if"]), printer, diags) if "if" in case else ""
            value = _printed(entry, (*at, "is") if at else ("body",), case["is"], printer, diags)
            cases.append((condition or "", value or ""))
        out.append(
            DecompositionSpec(
                entry.id,
                entry["doc"],
                _function(entry.id),
                parameters,
                when or "True",
                tuple(cases),
                entry.get("function", ""),
            )
        )
    return tuple(out)


def emit(model: Model) -> dict[str, str]:
    """The three files of mutations.yaml, or nothing when there is no such spec."""
    spec = model.part("mutations", None)
    if not spec:
        return {}
    out = {}
    for name in ("schemas", "dispatch_tables", "wrapper_steps"):
        path = f"generated/{name}.py"
        values: dict[str, Any] = {
            "header": header(path, SPEC),
            "spec": spec,
            "literal": literal,
            "into": _imports(spec, name),
        }
        out[path] = render(f"{name}.py.j2", **values)
    return out


def _imports(spec: Mutations, name: str) -> str:
    if name != "dispatch_tables":
        return ""
    enums = {k for t in spec.tables for k in (*t.over.values(), t.gives)} - {"bool", "steps"}
    return ", ".join(sorted(enums))


def emit_decompositions(model: Model) -> dict[str, str]:
    """`generated/decompositions.py`."""
    path = "generated/decompositions.py"
    specs, corrections, refusals = model.part("decompositions", ()) or ((), (), ())
    if not specs:
        return {}
    values = {
        "header": header(path, DECOMPOSITIONS_SPEC),
        "specs": specs,
        "corrections": corrections,
        "refusals": refusals,
    }
    return {path: render("decompositions.py.j2", **values)}
