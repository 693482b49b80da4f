"""Reads specs/targets.yaml, writes generated/targets.py: the machines to generate for, and how dtypes are spelled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..diagnostics import Diagnostics
from ..load import Document
from ..model import Model
from ..render import header, literal, render

PATH = "generated/targets.py"


@dataclass(frozen=True)
class TargetSet:
    """The targets of each device and the dtypes, each as plain dicts by name in file order."""

    cpu: dict[str, dict[str, Any]]
    gpu: dict[str, dict[str, Any]]
    dtypes: dict[str, dict[str, Any]]


def build(doc: Document, model: Model, diags: Diagnostics) -> TargetSet:
    """The tables, checked: a CPU target has lanes and flags, a GPU target a capability."""
    del model
    needed = {"cpu": ("lanes", "guard", "flags"), "cuda": ("capability", "warp")}
    for entry in doc.tagged("target"):
        for key in needed[entry["device"]]:
            if key not in entry:
                diags.error(entry.pos(), f"target '{entry.id}' is for {entry['device']} and needs the key '{key}'")
    cpu = {e.id: e.data for e in doc.tagged("target") if e["device"] == "cpu"}
    gpu = {e.id: e.data for e in doc.tagged("target") if e["device"] == "cuda"}
    return TargetSet(cpu, gpu, {e.id: e.data for e in doc.tagged("dtype")})


def emit(model: Model) -> dict[str, str]:
    """`generated/targets.py`, or nothing when there is no target spec."""
    part: TargetSet | None = model.part("targets", None)
    if part is None:
        return {}
    return {PATH: render("targets.py.j2", header=header(PATH, "specs/targets.yaml"), part=part, literal=literal)}
