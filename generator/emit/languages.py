"""Reads specs/languages.yaml, writes generated/languages.py: how kernels spell element types, and what their languages can do."""

from __future__ import annotations

from typing import Any

from ..diagnostics import Diagnostics
from ..load import Document
from ..model import Model
from ..render import header, literal, render

PATH = "generated/languages.py"


def build(doc: Document, model: Model, diags: Diagnostics) -> dict[str, dict[str, Any]]:
    """The languages by name, checked: all of them spell the same dtypes."""
    del model
    languages = {entry.id: entry for entry in doc.tagged("language")}
    known = {dtype: entry for entry in languages.values() for dtype in entry["dtypes"]}
    for entry in languages.values():
        for dtype, other in known.items():
            if dtype not in entry["dtypes"]:
                also = [(other.pos("dtypes", dtype), f"'{other.id}' spells it here")]
                diags.error(entry.key_pos("dtypes"), f"language '{entry.id}' lacks the dtype '{dtype}'", also=also)
    return {name: entry.data for name, entry in languages.items()}


def emit(model: Model) -> dict[str, str]:
    """`generated/languages.py`, or nothing when not all languages are there."""
    languages: dict[str, dict[str, Any]] = model.part("languages", {})
    if not {"cpp", "triton"} <= set(languages):
        return {}
    head = header(PATH, "specs/languages/*.yaml")
    return {PATH: render("languages.py.j2", header=head, literal=literal, **languages)}
