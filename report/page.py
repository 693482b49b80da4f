"""The page of an explanation: one file with its style, script and data, which asks for nothing from elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

__all__ = ["page_text", "write_page"]

FOLDER = Path(__file__).parent / "page"
SCRIPTS = ("base.js", "layout.js", "picture.js", "charts.js", "memory.js", "steps.js", "main.js")


def page_text(facts: dict[str, Any]) -> str:
    """The HTML of what `report.data.report` returns."""
    parts = {
        "TITLE": _escaped(facts["title"]),
        "STYLE": _read("style.css"),
        "SCRIPT": "\n".join(map(_read, SCRIPTS)),
        # Nothing in a text may end the element that holds the data.
        "DATA": json.dumps(facts, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda found: parts[found[1]], _read("page.html"))


def write_page(facts: dict[str, Any], path: Path) -> Path:
    """Raises `OSError` where the file cannot be written."""
    path.write_text(page_text(facts), encoding="utf-8", newline="\n")
    return path


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
