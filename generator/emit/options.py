"""Reads specs/options.yaml, writes generated/options.py: what Inductor's options and modes mean here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..diagnostics import Diagnostics, Pos, did_you_mean
from ..load import Document, Entry
from ..model import Model
from ..render import header, literal, render
from .config import SettingSpec

PATH = "generated/options.py"


@dataclass(frozen=True)
class OptionSpec:
    """Options with one meaning: the group's name, their full names, the doc, the setting that takes the value (or ""), values of the
    option (JSON text) with those of the setting, and the values (JSON text) for which nothing has to be done.
    """

    group: str
    names: tuple[str, ...]
    doc: str
    setting: str
    values: tuple[tuple[str, Any], ...]
    holds: tuple[str, ...]


@dataclass(frozen=True)
class ModeSpec:
    """A mode: the settings that it changes, or None where it has no meaning here."""

    name: str
    doc: str
    settings: tuple[tuple[str, Any], ...] | None


@dataclass(frozen=True)
class OptionsPart:
    """All options and modes, in file order."""

    options: tuple[OptionSpec, ...]
    modes: tuple[ModeSpec, ...]


def build(doc: Document, model: Model, diags: Diagnostics) -> OptionsPart:
    """The options and modes, checked: a name stands once, settings exist and take the values, keys of `values` are JSON."""
    settings = {s.name: s for s in model.part("config")}
    places: dict[str, Pos] = {}
    options, modes = [], []
    for entry in doc:
        if entry.tag == "mode":
            _once(entry.id, entry.pos("mode"), places, diags)
            for name, value in (entry.get("settings") or {}).items():
                _check(settings, name, value, entry.key_pos("settings", name), diags)
            changed = tuple(entry["settings"].items()) if "settings" in entry else None
            modes.append(ModeSpec(entry.id, entry["doc"], changed))
            continue
        prefix = f"{entry['prefix']}." if "prefix" in entry else ""
        names = tuple(prefix + name for name in entry["names"])
        for k, name in enumerate(names):
            _once(name, entry.pos("names", k), places, diags)
        options.append(
            OptionSpec(
                group=entry.id,
                names=names,
                doc=entry["doc"],
                setting=entry.get("setting", ""),
                values=_values(entry, settings, diags),
                holds=tuple(json.dumps(value) for value in entry.get("holds") or ()),
            )
        )
    return OptionsPart(tuple(options), tuple(modes))


def _once(name: str, pos: Pos, places: dict[str, Pos], diags: Diagnostics) -> None:
    first = places.setdefault(name, pos)
    if first is not pos:
        diags.error(pos, f"'{name}' is mentioned twice", also=[(first, "the first is here")])


def _values(entry: Entry, settings: Mapping[str, SettingSpec], diags: Diagnostics) -> tuple[tuple[str, Any], ...]:
    values: Mapping[str, Any] = entry.get("values") or {}
    if "setting" not in entry:
        if values:
            diags.error(entry.key_pos("values"), "'values' goes with the key 'setting'")
        return ()
    if entry["setting"] not in settings:
        hint = did_you_mean(entry["setting"], settings)
        diags.error(entry.pos("setting"), f"there is no setting '{entry['setting']}'{hint}")
        return ()
    for text, value in values.items():
        if not _is_json(text):
            diags.error(
                entry.key_pos("values", text), f"expected the JSON text of a value, such as \"true\", found '{text}'"
            )
        _check(settings, entry["setting"], value, entry.pos("values", text), diags)
    return tuple(values.items())


def _is_json(text: str) -> bool:
    try:
        return json.dumps(json.loads(text)) == text
    except ValueError:
        return False


def _check(settings: Mapping[str, SettingSpec], name: str, value: Any, pos: Pos, diags: Diagnostics) -> None:
    setting = settings.get(name)
    if setting is None:
        diags.error(pos, f"there is no setting '{name}'{did_you_mean(name, settings)}")
    elif not setting.accepts(value) or (setting.choices and value not in setting.choices):
        diags.error(pos, f"setting '{name}' does not take {literal(value)}")


def emit(model: Model) -> dict[str, str]:
    """`generated/options.py`, or nothing when there is no such spec."""
    part: OptionsPart | None = model.part("options", None)
    if part is None:
        return {}
    return {PATH: render("options.py.j2", header=header(PATH, "specs/options.yaml"), part=part, literal=literal)}
