"""Reads specs/recompute.yaml and the kinds of specs/ops.yaml, writes generated/recompute.py: the class of every operator."""

from __future__ import annotations

from ..diagnostics import Diagnostics, Pos, did_you_mean
from ..load import Document
from ..model import Model
from ..op_entries import OpEntry
from ..render import header, render

PATH = "generated/recompute.py"
#: The class of an operator that nothing mentions; written out only for those that the spec names.
DEFAULT = "heavy"


def build(doc: Document, model: Model, diags: Diagnostics) -> dict[str, str]:
    """Overload → class, for all that torch's schema and the default class do not tell. Every kind has one class, and an operator
    is mentioned once.
    """
    kinds: dict[str, tuple[str, Pos]] = {}
    named: dict[str, tuple[str, Pos]] = {}
    for entry in doc:
        for k, kind in enumerate(entry.get("kinds", ())):
            _put(kinds, kind, entry.id, entry.pos("kinds", k), "kind", diags)
        for k, name in enumerate(entry.get("ops", ())):
            pos = entry.pos("ops", k)
            found = model.torch.get(name)
            if not found:
                hint = did_you_mean(name, model.torch.packets())
                diags.error(pos, f"torch has no operator '{name}'{hint}")
            for schema in found:
                if not schema.mutates:
                    _put(named, schema.id, entry.id, pos, "operator", diags)
    entries: tuple[OpEntry, ...] = model.part("ops")
    for kind in sorted({e.kind for e in entries} - set(kinds)) if doc.entries else ():
        diags.error(doc.entries[-1].pos(), f"no class has the kind '{kind}' of ops.yaml")
    if diags:
        return {}
    classes = {s.id: kinds[e.kind][0] for e in entries for s in e.schemas if not s.is_view}
    told = {name: value for name, value in classes.items() if value != DEFAULT}
    return dict(sorted((told | {name: where[0] for name, where in named.items()}).items()))


def _put(table: dict[str, tuple[str, Pos]], name: str, value: str, pos: Pos, what: str, diags: Diagnostics) -> None:
    first = table.setdefault(name, (value, pos))
    if first[1] is not pos:
        diags.error(pos, f"{what} '{name}' has a class already", also=[(first[1], "the first one is here")])


def emit(model: Model) -> dict[str, str]:
    """`generated/recompute.py`, or nothing when there is no such spec."""
    classes: dict[str, str] = model.part("recompute", {})
    if not classes:
        return {}
    docs = {e.id: e["doc"] for e in model.entries("recompute")}
    by_class = {c: [name for name, value in classes.items() if value == c] for c in docs}
    return {PATH: render("recompute.py.j2", header=header(PATH, "specs/recompute.yaml"), docs=docs, by_class=by_class)}
