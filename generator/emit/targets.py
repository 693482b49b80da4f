"""Reads specs/targets.yaml, writes generated/targets.py: the machines to generate for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..check import schema_of
from ..diagnostics import Diagnostics
from ..load import Document, Entry
from ..model import Model
from ..records import records
from ..render import header, literal, render

PATH = "generated/targets.py"
_PARTS = ("limits", "budgets", "costs")
#: Sizes of a GPU of which blocks, which are powers of two, are made.
_POWERS = (
    ("limits", "line"),
    ("limits", "warp"),
    ("limits", "warps"),
    ("limits", "vector"),
    ("limits", "sector"),
    ("limits", "mma", "edge"),
    ("limits", "mma", "steps"),
    ("budgets", "tile"),
)


@dataclass(frozen=True)
class TargetSet:
    """The targets of each device, as plain dicts by name in file order."""

    cpu: dict[str, dict[str, Any]]
    gpu: dict[str, dict[str, Any]]


def build(doc: Document, model: Model, diags: Diagnostics) -> TargetSet:
    """The tables, checked: sizes of a CPU target's tiles are whole vectors, and those of a GPU's blocks powers of two."""
    del model
    guarded: dict[str, Entry] = {}
    for entry in doc.tagged("target"):
        if entry["device"] == "cpu":
            _check_vectors(entry, diags)
            first = guarded.setdefault(entry["guard"], entry)
            if first["lanes"] != entry["lanes"]:
                also = [(first.pos("lanes"), f"'{first.id}' has {first['lanes']}")]
                message = (
                    f"targets of one guard have vectors of one size: the compiler's macro '{entry['guard']}' decides it"
                )
                diags.error(entry.pos("lanes"), message, also=also)
        else:
            _check_powers(entry, diags)
    cpu = {e.id: e.data for e in doc.tagged("target") if e["device"] == "cpu"}
    gpu = {e.id: e.data for e in doc.tagged("target") if e["device"] == "cuda"}
    return TargetSet(cpu, gpu)


def _check_vectors(entry: Entry, diags: Diagnostics) -> None:
    lanes = entry["lanes"]
    for key, least in (("edge", 4 * lanes), ("column", lanes)):
        if (value := entry["budgets"][key]) % least:
            message = f"'budgets.{key}' must be a multiple of {least} for vectors of {lanes} elements, found {value}"
            diags.error(entry.pos("budgets", key), message)


def _check_powers(entry: Entry, diags: Diagnostics) -> None:
    for path in _POWERS:
        value: Any = entry.data
        for key in path:
            value = value[key]
        if value & (value - 1):
            diags.error(entry.pos(*path), f"'{'.'.join(path)}' must be a power of two, found {value}")


def emit(model: Model) -> dict[str, str]:
    """`generated/targets.py`, or nothing when there is no target spec."""
    part: TargetSet | None = model.part("targets", None)
    if part is None:
        return {}
    head = header(PATH, "specs/targets.yaml")
    schema = schema_of("targets")
    parts = [schema.definition(device)["properties"][key] for device in ("cpu", "cuda") for key in _PARTS]
    return {PATH: render("targets.py.j2", header=head, part=part, records=records(schema, parts), literal=literal)}
