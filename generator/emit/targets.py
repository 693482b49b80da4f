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
            first = guarded.setdefault(entry["guard"], entry)
            # Sizes that follow from a wrong number of lanes would be reported for nothing.
            if _check_lanes(entry, first, diags):
                _check_vectors(entry, diags)
            _check_features(entry, diags)
        else:
            _check_powers(entry, diags)
    cpu = {e.id: e.data for e in doc.tagged("target") if e["device"] == "cpu"}
    gpu = {e.id: e.data for e in doc.tagged("target") if e["device"] == "cuda"}
    return TargetSet(cpu, gpu)


def _check_lanes(entry: Entry, first: Entry, diags: Diagnostics) -> bool:
    """Whether the vectors of a CPU target have the size of the first target with its guard."""
    lanes, guard = entry["lanes"], entry["guard"]
    if lanes == first["lanes"]:
        return True
    whose = f"with the guard '{guard}'" if guard else "without a guard"
    message = f"'lanes' must be {first['lanes']}, found {lanes}: all targets {whose} have vectors of one size"
    also = [(first.pos("lanes"), f"'{first.id}' has {first['lanes']}")]
    diags.error(entry.pos("lanes"), message, also=also)
    return False


def _check_vectors(entry: Entry, diags: Diagnostics) -> None:
    lanes = entry["lanes"]
    for key, least, why in (
        ("edge", 4 * lanes, "a quarter of a tile's edge is made of whole vectors"),
        ("column", lanes, "the sums of columns are held in whole vectors"),
    ):
        if (value := entry["budgets"][key]) % least:
            message = f"'budgets.{key}' must be a multiple of {least}, found {value}: {why}, of {lanes} elements each"
            diags.error(entry.pos("budgets", key), message)


def _check_features(entry: Entry, diags: Diagnostics) -> None:
    if entry["features"] and entry["architecture"] != "x86_64":
        message = f"'features' must be empty for the architecture '{entry['architecture']}': only those of x86_64 are detected"
        diags.error(entry.pos("features"), message)


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
