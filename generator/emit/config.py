"""Reads specs/config.yaml and the targets, writes generated/config.py: one typed field per setting, and a table of all settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..diagnostics import Diagnostics, did_you_mean, one_of
from ..load import Document, Entry
from ..model import Model
from ..render import header, literal, render

PATH = "generated/config.py"
_PYTHON: dict[str, type] = {
    "bool": bool,
    "int": int,
    "float": float,
    "part": float,
    "str": str,
    "choice": str,
    "path": str,
}


@dataclass(frozen=True)
class SettingSpec:
    """One setting: dotted name, type (`bool`, `int`, `float`, `part`, `str`, `choice`, `path`), default, choices, and its
    doc.
    """

    name: str
    type: str
    default: Any
    choices: tuple[str, ...]
    env: str
    affects: str
    doc: str

    @property
    def field(self) -> str:
        """The Python field: dots become underscores."""
        return self.name.replace(".", "_")

    @property
    def annotation(self) -> str:
        """The Python type of the field."""
        return _PYTHON[self.type].__name__

    def accepts(self, value: Any) -> bool:
        """Whether `value` has the declared type: a bool is no int, numbers are never negative, an int may stand for a
        float, and a part is 1 at most.
        """
        kind = _PYTHON[self.type]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return 0 <= value <= (1 if self.type == "part" else value) and (kind is float or kind is type(value))
        return type(value) is kind


def build(doc: Document, model: Model, diags: Diagnostics) -> tuple[SettingSpec, ...]:
    """The settings, checked: default and choices have the declared type, the default is a choice, env follows the
    name. A `target` is a choice of the processors in specs/targets.
    """
    targets = model.part("targets", None) or (model.base and model.base.part("targets", None))
    machines = ("auto", *sorted(targets.cpu if targets else ()))
    out = []
    seen: dict[str, Entry] = {}
    for entry in doc:
        is_target = entry["type"] == "target"
        s = SettingSpec(
            name=entry["setting"],
            type="choice" if is_target else entry["type"],
            default=entry["default"],
            choices=machines if is_target else tuple(entry.get("choices") or ()),
            env=entry["env"],
            affects=entry["affects"],
            doc=entry["doc"],
        )
        if s.type == "choice" and not s.choices:
            diags.error(entry.pos("type"), "type 'choice' needs the key 'choices'")
        if "choices" in entry and entry["type"] != "choice":
            diags.error(entry.key_pos("choices"), f"'choices' goes with type 'choice', found type '{entry['type']}'")
        expected = "OPFORGE_" + s.field.upper()
        if s.env != expected:
            diags.error(entry.pos("env"), f"expected the environment variable '{expected}', found '{s.env}'")
        if not s.accepts(s.default):
            diags.error(entry.pos("default"), f"expected a default of type '{s.type}', found {literal(s.default)}")
        elif s.choices and s.default not in s.choices:
            hint = did_you_mean(s.default, s.choices)
            diags.error(entry.pos("default"), f"expected {one_of(s.choices)}, found '{s.default}'{hint}")
        if (first := seen.setdefault(s.field, entry)) is not entry:
            also = [(first.pos("setting"), "the first one is here")]
            diags.error(entry.pos("setting"), f"'{s.name}' takes the same field '{s.field}' as '{first.id}'", also=also)
        out.append(s)
    return tuple(out)


def emit(model: Model) -> dict[str, str]:
    """`generated/config.py`, or nothing when there is no config spec."""
    settings = model.part("config")
    if not settings:
        return {}
    text = render("config.py.j2", header=header(PATH, "specs/config.yaml"), settings=settings, literal=literal)
    return {PATH: text}
