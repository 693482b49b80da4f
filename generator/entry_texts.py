"""The texts of an operator entry: the trees of its expressions, by place, and where mistakes in them go."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from .diagnostics import Diagnostics
from .expr.ops import Names
from .expr.parse import Text
from .expr.walk import stored
from .load import Entry
from .parts import values_of
from .torch_schemas import TorchSchema


class EntryTexts:
    """An entry for the overloads `schemas`, with the expressions that are parsed so far."""

    def __init__(self, entry: Entry, schemas: tuple[TorchSchema, ...], names: Names, diags: Diagnostics) -> None:
        self.entry, self.schemas, self.names, self.diags = entry, schemas, names, diags
        self.kind = str(entry.get("kind"))
        self.trees: dict[tuple[str | int, ...], Any] = {}
        self.sources: dict[tuple[str | int, ...], Text] = {}
        self.values = values_of(entry)
        self.filled: dict[tuple[str | int, ...], set[str]] = {}
        """The expressions that name values, and which."""

    def error(self, path: tuple[str | int, ...], message: str) -> None:
        self.diags.error(self.entry.pos(*path), message)

    def text(self, path: tuple[str | int, ...], note: str = "") -> Text | None:
        """The string at `path`; plain numbers and booleans count as their Python text."""
        value: Any = self.entry.data
        for part in path:
            value = value[part]
        if isinstance(value, list):
            self.error(path, 'expected an expression; a list of expressions is written in quotes, as in "[n, 1]"')
            return None
        if isinstance(value, dict) or value is None:
            self.error(path, "expected an expression")
            return None
        return Text(self.entry, path, value if isinstance(value, str) else repr(value), self.diags, note)

    @cached_property
    def stored(self) -> frozenset[str]:
        """Every name that the expressions bind, once all are parsed."""
        trees = [t for v in self.trees.values() if v for t in (v if isinstance(v, list) else [v])]
        return frozenset(stored(*trees))
