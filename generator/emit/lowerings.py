"""Reads specs/ops.yaml and what it includes, writes generated/ops/<spec file>.py (one function per overload) and generated/ops/__init__.py."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable
from keyword import iskeyword
from typing import Any

from ..check_ops import symbol_overload
from ..expr.function import LOCALS
from ..expr.helpers import IMPORTED
from ..expr.printer import print_body, print_expression
from ..expr.types import DTYPE_NUMBERS
from ..model import Model
from ..op_entries import Lowering, OpEntry, Section
from ..render import header, literal
from ..torch_schemas import TorchArg, TorchSchema

FOLDER = "generated/ops"
_RESERVED = frozenset((*dir(builtins), *IMPORTED, *LOCALS))


def emit(model: Model) -> dict[str, str]:
    """The lowering modules and their table, or nothing when there is no operator spec."""
    entries: tuple[OpEntry, ...] = model.part("ops")
    if not entries:
        return {}
    families: dict[str, list[OpEntry]] = {}
    for e in entries:
        families.setdefault(e.family, []).append(e)
    files = {}
    for family, group in sorted(families.items()):
        if any(e.lowerings for e in group):
            path = f"{FOLDER}/{family}.py"
            spec = "specs/ops.yaml" if family == "ops" else f"specs/ops/{family}.yaml"
            files[path] = header(path, spec) + module_text(group, "...runtime.lower.language")
    files[f"{FOLDER}/__init__.py"] = header(f"{FOLDER}/__init__.py", "specs/ops.yaml") + _table(
        families, model.torch.versions
    )
    return files


# -- modules -----------------------------------------------------------------------------------------------------------
def module_text(entries: Iterable[OpEntry], runtime: str) -> str:
    """The functions of some entries, with the imports that they need."""
    functions = []
    imports: set[str] = set()
    scalars: set[str] = set()
    for entry in entries:
        for lowering in entry.lowerings:
            functions.append(f"# spec: {entry.id}\n{function_text(lowering)}")
            for name, alias in lowering.function.imports.items():
                imports.add(name if name == alias else f"{name} as {alias}")
            if any("s." in line for line in functions[-1].splitlines()) and lowering.function.uses_scalars:
                scalars.add(lowering.function.local("s"))
    head = '"""Lowerings: how each operator is computed, element by element."""\n\n'
    lines = [f"from {runtime} import scalar_ops as {name}" for name in sorted(scalars)]
    if imports:
        lines.append(f"from {runtime}.names import {', '.join(sorted(imports))}")
    return head + "\n".join(lines) + "\n\n\n" + "\n\n\n".join(functions) + "\n"


def function_name(schema: TorchSchema) -> str:
    """`add_Tensor`; the packet alone for a default overload, unless that is a name which the functions use."""
    if schema.overload != "default" or schema.name in _RESERVED or iskeyword(schema.name):
        return f"{schema.name}_{schema.overload}"
    return schema.name


def function_text(lowering: Lowering) -> str:
    """One lowering as Python."""
    out = _Function(lowering)
    return out.text()


class _Function:
    def __init__(self, lowering: Lowering) -> None:
        self.made, self.f = lowering, lowering.function
        self.b, self.p, self.i, self.r, self.out, self.value = (
            self.f.local(n) for n in ("b", "p", "i", "r", "out", "value")
        )

    def text(self) -> str:
        lines = [f"def {function_name(self.made.schema)}({self.parameters()}):"]
        sections = self.made.sections
        for section in self.made.required:
            lines.append(f"{self.b}.require({_print(section)}, {literal(section.text)})")
        if "native_if" in sections:
            lines.append(f"{self.b}.native_if({_print(sections['native_if'])}, {literal(sections['native_if'].text)})")
        for name, section, error, says in self.made.each:
            condition = f"lambda {self.value}: {_print(section)}"
            lines.append(f"{name} = {self.b}.each({name}, {condition}, {literal(error)}, {literal(says)})")
        for name, section in self.made.lets:
            lines.append(f"{name} = {_print(section)}")
        if "raises" in sections:
            lines.append(f"{self.b}.raises({self.get('raises')})")
        if "body" in sections:
            tree = sections["body"].tree
            assert isinstance(tree, list)
            lines += print_body(tree, sections["body"].resolved).rstrip("\n").split("\n")
        elif self.made.cases:
            lines += self.pointwise()
        elif "base" in sections:
            lines += self.scatter()
        else:
            lines += self.elements()
        return "\n    ".join(lines)

    def parameters(self) -> str:
        parts, star = [self.b], False
        for a in self.made.schema.args:
            if a.kwarg_only and not star:
                parts.append("*")
                star = True
            parts.append(self.f.printed(a.name) + ("" if a.default is None else f"={_default(a)}"))
        return ", ".join(parts)

    def get(self, key: str) -> str:
        return _print(self.made.sections[key])

    def pointwise(self) -> list[str]:
        names = [self.f.printed(n) for n in (*self.made.promoted, *self.made.plain)]
        args = [_tuple(names[: len(self.made.promoted)])]
        if self.made.plain:
            args.append(f"plain={_tuple(names[len(self.made.promoted) :])}")
        args += [f"{k}={literal(v)}" for k, v in self.made.words.items() if v != "default"]
        lines = [
            f"{self.p} = {self.b}.pointwise({', '.join(args)})",
            f"{_tuple(names) if len(names) == 1 else ', '.join(names)} = {self.p}.operands",
        ]
        lines += self.withs()
        dtype = f", {self.get('dtype')}" if "dtype" in self.made.sections else ""
        for condition, value in self.made.cases:
            result = f"return {self.p}.result({_print(value)}{dtype})"
            lines += [f"if {_print(condition)}:", f"    {result}"] if condition is not None else [result]
        return lines

    def elements(self) -> list[str]:
        """Views, gathers, creations, reductions and scans."""
        sections, words = self.made.sections, self.made.words
        lines = [f"{self.out} = {self.get('shape')}"]
        if self.uses(self.i):
            lines.append(f"{self.i} = {self.b}.coords({self.out})")
        dtype = f", {self.get('dtype')}" if "dtype" in sections else ""
        if "over" in sections:
            lines.append(f"{self.r} = {self.b}.rcoords({self.get('over')})")
        lines += self.withs()
        if "over" in sections:
            call = f"{self.b}.reduce({literal(words['reduce'])}, {self.out}, {self.r}, {self.get('at')}{dtype}"
            if "finish" not in sections:
                return [*lines, f"return {call})"]
            lines.append(f"{self.value} = {self.b}.at({call}, exact=True), {self.i})")
            return [*lines, f"return {self.b}.define({self.out}, {self.get('finish')}{dtype})"]
        if "dim" in sections:
            return [
                *lines,
                f"return {self.b}.scan({literal(words['scan'])}, {self.out}, {self.get('dim')}, {self.get('at')}{dtype})",
            ]
        return [*lines, f"return {self.b}.define({self.out}, {self.get('at')}{dtype})"]

    def uses(self, name: str) -> bool:
        """Whether an expression mentions the coordinates, or the reduced value is read at them."""
        texts = [self.get(k) for k in ("at", "finish") if k in self.made.sections] + [
            _print(w) for _, w in self.made.withs
        ]
        return "finish" in self.made.sections or any(
            n.id == name for t in texts if name in t for n in ast.walk(ast.parse(t)) if isinstance(n, ast.Name)
        )

    def withs(self) -> list[str]:
        """The names that are defined at the coordinates."""
        return [f"{name} = {_print(section)}" for name, section in self.made.withs]

    def scatter(self) -> list[str]:
        sections = self.made.sections
        extra = f", mode={self.get('mode')}" if "mode" in sections else ""
        extra += f", when={self.get('when')}" if "when" in sections else ""
        call = f"{self.b}.scatter({self.get('base')}, {self.r}, {self.get('at')}, {self.get('into')}{extra})"
        lines = [f"{self.r} = {self.b}.rcoords({self.get('over')})", *self.withs()]
        if "finish" not in sections:
            return [*lines, f"return {call}"]
        return [
            *lines,
            f"{self.out} = {call}",
            f"{self.i} = {self.b}.coords({self.out}.shape)",
            f"{self.value} = {self.b}.at({self.out}, {self.i})",
            f"return {self.b}.define({self.out}.shape, {self.get('finish')}, {self.out}.dtype)",
        ]


def _print(section: Section) -> str:
    assert isinstance(section.tree, ast.expr)
    return print_expression(section.tree, section.resolved)


def _tuple(names: list[str]) -> str:
    return f"({', '.join(names)},)" if len(names) == 1 else f"({', '.join(names)})"


def _default(arg: TorchArg) -> str:
    text = arg.default or "None"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return "None"  # a layout or memory format: nothing here reads it
    if arg.type.startswith("ScalarType") and isinstance(value, int):
        return literal(DTYPE_NUMBERS.get(value))
    if isinstance(value, (int, float)) and not isinstance(value, bool) and arg.type.rstrip("?").endswith("]"):
        return literal([value])
    return literal(value)


# -- the table ---------------------------------------------------------------------------------------------------------
def tables(entries: Iterable[OpEntry], module: str = "") -> dict[str, dict[str, Any]]:
    """The tables of the generated package as plain dicts of source; a lowering is named `module:function`."""
    lowerings: dict[str, str] = {}
    operators: dict[str, str] = {}
    extern: dict[str, str] = {}
    out: dict[str, str] = {}
    rows: dict[str, int] = {}
    products: dict[str, tuple[int, ...]] = {}
    any_strides: dict[str, None] = {}
    opaque: dict[str, tuple[int, ...]] = {}
    unspecified: dict[str, None] = {}
    complex_: dict[str, bool] = {}
    for e in entries:
        for w in e.lowerings:
            lowerings[w.schema.id] = f"{module or e.family}:{function_name(w.schema)}"
        if e.symbol:
            operators[e.symbol] = symbol_overload(e.schemas)
        if e.why:
            extern |= {s.id: e.why for s in e.schemas}
        out |= dict(e.out)
        rows |= {s.id: e.row_bytes for s in e.schemas if e.row_bytes}
        products |= dict(e.product)
        any_strides |= dict.fromkeys(s.id for s in e.schemas if e.any_strides)
        opaque |= {s.id: e.opaque for s in e.schemas if e.opaque}
        unspecified |= dict.fromkeys(s.id for s in e.schemas if e.unspecified)
        complex_ |= {w.schema.id: True for w in e.lowerings if e.complex}
    return {
        "lowerings": lowerings,
        "operators": operators,
        "extern": extern,
        "out": out,
        "rows": rows,
        "products": products,
        "any_strides": any_strides,
        "opaque": opaque,
        "unspecified": unspecified,
        "complex": complex_,
    }


def _table(families: dict[str, list[OpEntry]], versions: tuple[str, ...]) -> str:
    entries = [e for _, group in sorted(families.items()) for e in group]
    t = tables(entries)
    lines = [
        '"""Tables of all operators: lowerings (their modules are imported on first use), operators by symbol, externs by reason."""',
        "",
        "from ...runtime.lower.language.table import Lowerings, OpInfo",
        "",
        f"TORCH_VERSIONS: tuple[str, ...] = {literal(versions)}",
        "LOWERINGS = Lowerings(",
        "    __name__,",
        "    {",
        *(f"        {literal(k)}: {literal(v)}," for k, v in sorted(t["lowerings"].items())),
        "    },",
        ")",
        "OPERATORS: dict[str, str] = {",
        *(f"    {literal(k)}: {literal(v)}," for k, v in sorted(t["operators"].items())),
        "}",
        "EXTERN: dict[str, str] = {",
        *(f"    {literal(k)}: {literal(v)}," for k, v in sorted(t["extern"].items())),
        "}",
        "OUT: dict[str, str] = {",
        *(f"    {literal(k)}: {literal(v)}," for k, v in sorted(t["out"].items())),
        "}",
        "ROW_BYTES: dict[str, int] = {",
        *(f"    {literal(k)}: {literal(v)}," for k, v in sorted(t["rows"].items())),
        "}",
        "PRODUCTS: dict[str, tuple[int, ...]] = {",
        *(f"    {literal(k)}: {literal(v)}," for k, v in sorted(t["products"].items())),
        "}",
        "ANY_STRIDES: set[str] = {",
        *(f"    {literal(k)}," for k in sorted(t["any_strides"])),
        "}",
        "OPAQUE: dict[str, tuple[int, ...]] = {",
        *(f"    {literal(k)}: {literal(v)}," for k, v in sorted(t["opaque"].items())),
        "}",
        "UNSPECIFIED: frozenset[str] = frozenset({",
        *(f"    {literal(k)}," for k in sorted(t["unspecified"])),
        "})",
        "COMPLEX: set[str] = {",
        *(f"    {literal(k)}," for k in sorted(t["complex"])),
        "}",
        "OPS: dict[str, OpInfo] = {",
        *(f"    {literal(e.id)}: {_info(e)}," for e in sorted(entries, key=lambda e: e.id)),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _info(e: OpEntry) -> str:
    overloads = literal(tuple(s.id for s in e.schemas))
    return f"OpInfo({literal(e.kind)}, {literal(e.doc)}, {literal(e.family)}, {overloads})"
