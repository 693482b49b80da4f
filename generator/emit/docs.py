"""Reads the schemas and all specs, writes docs/spec-reference.md (every key of every spec), docs/settings.md and docs/operators.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..check import schema_of
from ..model import Model
from ..render import cell, header, render
from ..schema import SchemaFile
from .config import SettingSpec
from .operator_page import operators_page
from .options import OptionSpec

REFERENCE = "docs/spec-reference.md"
SETTINGS = "docs/settings.md"
OPERATORS = "docs/operators.md"
_AFFECTS = {
    "code": "Settings of the compiled code",
    "run": "Settings of how opforge runs",
    "debug": "Settings for seeing what happens",
}
_VALUES = {"int": "a whole number", "float": "a number", "part": "a number from 0 to 1", "str": "text"}
_TYPES = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "bool",
    "array": "list",
    "object": "mapping",
    "null": "null",
}


def emit(model: Model) -> dict[str, str]:
    """The pages."""
    kinds = [k for k in sorted(model.documents) if k != "polynomials"]
    files = [_file(kind, schema_of(kind)) for kind in kinds]
    out = {
        REFERENCE: render("spec_reference.md.j2", header=header(REFERENCE, "specs/schema/*.schema.json"), files=files)
    }
    if settings := model.part("config"):
        parts = [
            (title, [_setting(s) for s in settings if s.affects == affects]) for affects, title in _AFFECTS.items()
        ]
        honoured = [_option(o) for o in model.part("options").options if o.setting] if model.part("options") else []
        head = header(SETTINGS, "specs/config.yaml")
        out[SETTINGS] = render("settings.md.j2", header=head, parts=parts, options=honoured)
    if model.part("ops"):
        out[OPERATORS] = operators_page(model, OPERATORS)
    return out


def _setting(s: SettingSpec) -> dict[str, str]:
    takes = [f"`{c}`" for c in s.choices] or [_VALUES.get(s.type, s.type)]
    default = s.default if isinstance(s.default, str) and s.default else json.dumps(s.default)
    return {"name": s.name, "takes": ", ".join(takes), "default": default, "env": s.env, "doc": cell(s.doc)}


def _option(o: OptionSpec) -> dict[str, str]:
    values = ", ".join(f"`{text}` is `{json.dumps(value)}`" for text, value in o.values) or "the same"
    names = ", ".join(f"`{name}`" for name in o.names)
    return {"names": names, "setting": o.setting, "takes": values, "doc": cell(o.doc)}


def _file(kind: str, schema: SchemaFile) -> dict[str, Any]:
    entries = [e for tag in schema.tags() if tag != "include" for e in _entries(tag, schema)]
    return {"name": f"{kind}.yaml", "doc": schema.root["description"], "entries": entries}


def _entries(tag: str, schema: SchemaFile) -> Iterator[dict[str, Any]]:
    """A definition, or each of its alternatives (`pointwise`, `view`, …), with the rows of its key table."""
    definition = schema.definition(tag)
    if "oneOf" not in definition:
        yield {"name": tag, "rows": list(_keys(definition, schema))}
        return
    for branch in definition["oneOf"]:
        name = branch["$ref"].rpartition("/")[2]
        yield {"name": f"{tag}: {name}", "rows": list(_keys(schema.resolve(branch), schema))}


def _keys(definition: Mapping[str, Any], schema: SchemaFile) -> Iterator[dict[str, str]]:
    needed = definition.get("required", ())
    for key, ref in definition["properties"].items():
        value = schema.resolve(ref)
        yield {
            "key": key,
            "type": cell(_type(value, schema)),
            "needed": "yes" if key in needed else "",
            "doc": cell(value.get("description", "")),
        }


def _type(value: Mapping[str, Any], schema: SchemaFile) -> str:
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join(f"`{e}`" for e in value["enum"])
    if "oneOf" in value:
        return " or ".join(_type(schema.resolve(branch), schema) for branch in value["oneOf"])
    if "title" in value:
        return str(value["title"])
    kinds = value["type"]
    listed: list[str] = kinds if isinstance(kinds, list) else [kinds]
    if listed == ["array"] and "items" in value:
        item = schema.resolve(value["items"])
        return f"list of {'mappings' if item.get('type') == 'object' else _type(item, schema)}"
    return " or ".join(_TYPES[k] for k in listed)
