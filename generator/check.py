"""Checks every entry by the JSON Schema of its file: all mistakes of all entries in one run, each with its place."""

from __future__ import annotations

from collections.abc import Collection

from .diagnostics import Diagnostics, Pos, did_you_mean, one_of
from .load import Document, Entry


def check_document(doc: Document, tags: Collection[str], diags: Diagnostics) -> tuple[Entry, ...]:
    """Check the entries of `doc`; returns those that have mistakes."""
    bad = []
    seen: dict[tuple[str, str], Pos] = {}
    for entry in doc:
        before = len(diags.mistakes)
        if entry.tag not in tags:
            message = f"an entry here begins with {one_of(tags)}, found '{entry.tag}'{did_you_mean(entry.tag, tags)}"
            diags.error(entry.key_pos(entry.tag), message)
        else:
            first = seen.setdefault((entry.tag, entry.id), entry.pos(entry.tag))
            if first != entry.pos(entry.tag):
                also = [(first, "the first one is here")]
                diags.error(entry.pos(entry.tag), f"{entry.tag} '{entry.id}' is defined twice", also=also)
        if len(diags.mistakes) > before:
            bad.append(entry)
    return tuple(bad)
