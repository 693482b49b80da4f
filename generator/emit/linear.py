"""Reads specs/linear.yaml, writes generated/linear.py: overloads whose results are multiples where their operands are."""

from __future__ import annotations

from ..diagnostics import Diagnostics, Pos, did_you_mean
from ..load import Document
from ..model import Model
from ..render import header, render

PATH = "generated/linear.py"


def build(doc: Document, model: Model, diags: Diagnostics) -> dict[str, list[str]]:
    """Form → overloads. An overload has one form."""
    places: dict[str, Pos] = {}
    forms: dict[str, list[str]] = {}
    for entry in doc:
        found = forms.setdefault(entry.id, [])
        for k, name in enumerate(entry["ops"]):
            pos = entry.pos("ops", k)
            schemas = [s for s in model.torch.get(name) if not s.mutates]
            if not schemas:
                diags.error(pos, f"torch has no operator '{name}'{did_you_mean(name, model.torch.packets())}")
            for schema in schemas:
                first = places.setdefault(schema.id, pos)
                if first is not pos:
                    diags.error(pos, f"operator '{schema.id}' is mentioned twice", also=[(first, "the first is here")])
                found.append(schema.id)
    return {form: sorted(ids) for form, ids in forms.items()}


def emit(model: Model) -> dict[str, str]:
    """`generated/linear.py`, or nothing when there is no such spec."""
    forms: dict[str, list[str]] = model.part("linear", {})
    if not forms:
        return {}
    docs = {e.id: e["doc"] for e in model.entries("linear")}
    return {PATH: render("linear.py.j2", header=header(PATH, "specs/linear.yaml"), docs=docs, forms=forms)}
