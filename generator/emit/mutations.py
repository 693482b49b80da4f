"""Reads specs/mutations.yaml, writes generated/schemas.py (enums, structs), generated/dispatch_tables.py (tables, roles, inverses of
views) and generated/wrapper_steps.py.
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
from .operators import Printer, function_name, overload_of, parameters_of, printed

SPEC = "specs/mutations.yaml"
HELPERS = ("reshape", "size_of", "dtype_of", "total", "inverse_permutation", "bound")
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
        overload_of(e, "op", model, diags)
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


def _inverse(entry: Entry, model: Model, diags: Diagnostics) -> InverseSpec | None:
    schema = overload_of(entry, "inverse", model, diags)
    if schema is None:
        return None
    parameters, names = parameters_of(schema, ("base", "value", "index", "b"))
    printer = Printer(model, {*names.values(), "base", "value", "index"}, "b.dispatch_node({op}, ({tuple}))", HELPERS)
    body = printed(entry, ("body",), entry["body"], printer, diags)
    if body is None:
        return None
    return InverseSpec(
        entry.id, entry["doc"], "into_" + function_name(entry.id), f"b, base, value, index, {parameters}", body
    )


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
