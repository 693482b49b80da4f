"""The model that emitters read: the loaded documents and, per kind of spec, the typed part that its builder made of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .diagnostics import Diagnostics
from .load import Document, Entry
from .torch_schemas import TorchSchemas


@dataclass(frozen=True)
class Model:
    """Everything known about the specs. `parts[kind]` is what the kind's builder returned; documents keep the
    positions.

    `specs` is the folder of the spec files (templates lie in `specs/kernels`). When a user's own file is generated,
    `base` is the model of opforge's own specs, in which names are looked up that the user's file does not define.
    """

    specs: Path
    documents: Mapping[str, Document]
    parts: Mapping[str, Any]
    torch: TorchSchemas
    base: Model | None = None
    broken: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)
    """Entries that their schema rejected, by kind: known by name, so that uses of them are no second error."""

    @property
    def size(self) -> int:
        """The number of entries in all documents."""
        return sum(len(d.entries) for d in self.documents.values())

    def part(self, kind: str, default: Any = ()) -> Any:
        """The typed part of `kind`, or `default` when there is none (yet)."""
        return self.parts.get(kind, default)

    def entries(self, kind: str) -> tuple[Entry, ...]:
        """The raw entries of `kind`."""
        return self.documents[kind].entries if kind in self.documents else ()


Build = Callable[[Document, Model, Diagnostics], Any]
"""Turns the entries of one document into frozen dataclasses; reports mistakes; sees the parts of the kinds listed
before it.
"""


@dataclass(frozen=True)
class SpecKind:
    """One kind of spec: its root file, the tags (first keys) of its entries, its builder, and the kinds that the
    builder reads.
    """

    name: str
    tags: tuple[str, ...]
    build: Build | None = None
    needs: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The root file's name in `specs/`."""
        return f"{self.name}.yaml"


Emit = Callable[[Model], dict[str, str]]
"""An emitter: the model in, path (relative to the package root) → text out. It touches no file."""
