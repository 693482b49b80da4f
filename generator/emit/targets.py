"""Reads specs/targets.yaml, writes generated/targets.py: the machines to generate for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..check import schema_of
from ..diagnostics import Diagnostics
from ..load import Document
from ..model import Model
from ..render import header, literal, render

PATH = "generated/targets.py"


@dataclass(frozen=True)
class TargetSet:
    """The targets of each device, as plain dicts by name in file order."""

    cpu: dict[str, dict[str, Any]]
    gpu: dict[str, dict[str, Any]]


def build(doc: Document, model: Model, diags: Diagnostics) -> TargetSet:
    """The tables, checked: a CPU target has lanes and flags, a GPU target a capability."""
    del model
    needed = {"cpu": ("lanes", "guard", "flags"), "cuda": ("capability",)}
    for entry in doc.tagged("target"):
        for key in needed[entry["device"]]:
            if key not in entry:
                diags.error(entry.pos(), f"target '{entry.id}' is for {entry['device']} and needs the key '{key}'")
    cpu = {e.id: e.data for e in doc.tagged("target") if e["device"] == "cpu"}
    gpu = {e.id: e.data for e in doc.tagged("target") if e["device"] == "cuda"}
    return TargetSet(cpu, gpu)


def emit(model: Model) -> dict[str, str]:
    """`generated/targets.py`, or nothing when there is no target spec."""
    part: TargetSet | None = model.part("targets", None)
    if part is None:
        return {}
    head = header(PATH, "specs/targets.yaml")
    return {PATH: render("targets.py.j2", header=head, part=part, sections=_sections(), literal=literal)}


def _sections() -> dict[str, tuple[str, dict[str, tuple[str, str]]]]:
    """The classes of a target's parts, as the schema has them: what each is, and the type and meaning of its fields."""
    schema = schema_of("targets")
    found: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {}

    def add(reference: dict[str, Any]) -> str:
        name = reference["$ref"].rpartition("/")[2]
        made = "".join(part.capitalize() for part in name.split("_"))
        fields = schema.root["$defs"][name]["properties"]
        found[made] = (
            _sentence(reference["description"]),
            {
                key: (add(field) if "$ref" in field else "int", _sentence(field["description"]))
                for key, field in fields.items()
            },
        )
        return made

    for device in ("cpu", "cuda"):
        target = schema.root["$defs"][device]["properties"]
        for part in ("limits", "budgets", "costs"):
            add(target[part])
    return found


def _sentence(said: str) -> str:
    return f"{said[0].upper()}{said[1:]}."
