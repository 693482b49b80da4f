"""The page of an explanation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["write_page"]


def write_page(facts: dict[str, Any], path: Path) -> Path:
    raise NotImplementedError
