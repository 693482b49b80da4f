"""Dataclasses that a schema describes: the parts of an entry that are mappings of numbers, with what each number means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .schema import SchemaFile

Records = dict[str, tuple[str, dict[str, tuple[str, str]]]]
"""By the name of the class: what it is, and the type and meaning of its fields."""


def class_name(reference: Mapping[str, Any]) -> str:
    """`GpuLimits` of a reference to `gpu_limits`."""
    return "".join(part.capitalize() for part in _name(reference).split("_"))


def records(schema: SchemaFile, references: Iterable[Mapping[str, Any]]) -> Records:
    """The classes of what is referred to, those of their parts first."""
    found: Records = {}

    def add(reference: Mapping[str, Any]) -> str:
        made = class_name(reference)
        fields = schema.root["$defs"][_name(reference)]["properties"]
        told = {key: (add(f) if _is_record(schema, f) else "int", _meaning(schema, f)) for key, f in fields.items()}
        found[made] = _sentence(reference["description"]), told
        return made

    for reference in references:
        add(reference)
    return found


def _is_record(schema: SchemaFile, field: Mapping[str, Any]) -> bool:
    return schema.resolve(field).get("type") == "object"


def _meaning(schema: SchemaFile, field: Mapping[str, Any]) -> str:
    return _sentence(schema.resolve(field)["description"])


def _name(reference: Mapping[str, Any]) -> str:
    return str(reference["$ref"].rpartition("/")[2])


def _sentence(said: str) -> str:
    return f"{said[0].upper()}{said[1:]}."
