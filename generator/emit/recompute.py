"""Reads specs/recompute.yaml and the kinds of specs/ops.yaml, writes generated/recompute.py: the class of every operator."""

from __future__ import annotations

from dataclasses import dataclass

from ..diagnostics import Diagnostics, Pos, did_you_mean
from ..load import Document
from ..model import Model
from ..op_entries import OpEntry
from ..render import header, render

PATH = "generated/recompute.py"
#: The class of an operator that nothing mentions; written out only for those that the spec names.
DEFAULT = "heavy"


@dataclass(frozen=True)
class Recompute:
    """Overload → class, for all that torch's schema and the default class do not tell; and the overloads that `picks` and `compares` name."""

    classes: dict[str, str]
    picks: tuple[str, ...]
    compares: tuple[str, ...]


def build(doc: Document, model: Model, diags: Diagnostics) -> Recompute:
    """Every kind has one class, and an operator is mentioned once among `ops`."""
    kinds: dict[str, tuple[str, Pos]] = {}
    named: dict[str, tuple[str, Pos]] = {}
    others: dict[str, set[str]] = {"picks": set(), "compares": set()}
    for entry in doc:
        for k, kind in enumerate(entry.get("kinds", ())):
            _put(kinds, kind, entry.id, entry.pos("kinds", k), "kind", diags)
        for k, name in enumerate(entry.get("ops", ())):
            pos = entry.pos("ops", k)
            for overload in _overloads(name, pos, model, diags):
                _put(named, overload, entry.id, pos, "operator", diags)
        for key, overloads in others.items():
            for k, name in enumerate(entry.get(key, ())):
                overloads.update(_overloads(name, entry.pos(key, k), model, diags))
    entries: tuple[OpEntry, ...] = model.part("ops")
    for kind in sorted({e.kind for e in entries} - set(kinds)) if doc.entries else ():
        diags.error(doc.entries[-1].pos(), f"no class has the kind '{kind}' of ops.yaml")
    if diags:
        return Recompute({}, (), ())
    classes = {s.id: kinds[e.kind][0] for e in entries for s in e.schemas if not s.is_view}
    told = {name: value for name, value in classes.items() if value != DEFAULT}
    told |= {name: where[0] for name, where in named.items()}
    return Recompute(dict(sorted(told.items())), tuple(sorted(others["picks"])), tuple(sorted(others["compares"])))


def _overloads(name: str, pos: Pos, model: Model, diags: Diagnostics) -> list[str]:
    """The overloads that an operator's name stands for and that write to no argument."""
    found = model.torch.get(name)
    if not found:
        diags.error(pos, f"torch has no operator '{name}'{did_you_mean(name, model.torch.packets())}")
    return [schema.id for schema in found if not schema.mutates]


def _put(table: dict[str, tuple[str, Pos]], name: str, value: str, pos: Pos, what: str, diags: Diagnostics) -> None:
    first = table.setdefault(name, (value, pos))
    if first[1] is not pos:
        diags.error(pos, f"{what} '{name}' has a class already", also=[(first[1], "the first one is here")])


def emit(model: Model) -> dict[str, str]:
    """`generated/recompute.py`, or nothing when there is no such spec."""
    spec: Recompute | None = model.part("recompute", None)
    if not spec or not spec.classes:
        return {}
    docs = {e.id: e["doc"] for e in model.entries("recompute")}
    by_class = {c: [name for name, value in spec.classes.items() if value == c] for c in docs}
    top = header(PATH, "specs/recompute.yaml")
    text = render("recompute.py.j2", header=top, docs=docs, by_class=by_class, picks=spec.picks, compares=spec.compares)
    return {PATH: text}
