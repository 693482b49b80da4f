"""Checks every entry by the JSON Schema of its file: all mistakes of all entries in one run, each with its place."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path

from .diagnostics import Diagnostics, Pos, did_you_mean, one_of
from .load import Document, Entry
from .schema import SchemaFile

SCHEMAS = Path(__file__).resolve().parent.parent / "specs" / "schema"


@cache
def schema_of(kind: str) -> SchemaFile:
    """The schema of a kind of spec file (`specs/schema/<kind>.schema.json`)."""
    return SchemaFile.read(SCHEMAS / f"{kind}.schema.json")


def check_document(doc: Document, kind: str, tags: Collection[str], diags: Diagnostics) -> tuple[Entry, ...]:
    """Check the entries of `doc`, which begin with one of `tags`; returns those that have mistakes."""
    bad = []
    seen: dict[tuple[str, str], Pos] = {}
    for entry in doc:
        before = len(diags.mistakes)
        if entry.tag not in tags:
            check_tag(entry, tags, diags)
        else:
            for fault in schema_of(kind).faults(entry.data, entry.tag):
                pos = entry.key_pos(*fault.path) if fault.on_key else entry.pos(*fault.path)
                diags.error(pos, fault.message)
            for path, name in entry.names():
                pos = entry.name_pos(*path)
                first = seen.setdefault((entry.tag, name), pos)
                if first is not pos:
                    diags.error(pos, f"{entry.tag} '{name}' is defined twice", also=[(first, "the first one is here")])
        if len(diags.mistakes) > before:
            bad.append(entry)
    return tuple(bad)


def check_tag(entry: Entry, tags: Collection[str], diags: Diagnostics) -> None:
    """Report an entry whose first key is none of `tags`."""
    if found := next((t for t in tags if t in entry.data), None):
        diags.error(
            entry.key_pos(found), f"the key '{found}' must be the first of its entry, found '{entry.tag}' first"
        )
    else:
        hint = did_you_mean(entry.tag, tags)
        diags.error(entry.key_pos(entry.tag), f"an entry here begins with {one_of(tags)}, found '{entry.tag}'{hint}")
