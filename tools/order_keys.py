"""Puts the keys of spec entries into their schema's order, in place: `python tools/order_keys.py specs/ops/*.yaml`.

Works on whole lines (a key with its value and the comments below it moves as a block), so nothing else changes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from opforge.generator.check import schema_of
from opforge.generator.diagnostics import Diagnostics
from opforge.generator.load import Entry, load_spec
from opforge.generator.run import kind_of_tag


def ordered(entry: Entry, lines: list[str], end: int) -> list[str] | None:
    """The lines of an entry (up to `end`, exclusive) with its keys in order; None if they are so, or share lines."""
    kind = kind_of_tag(entry.tag)
    if kind is None:
        return None
    faults = [f for f in schema_of(kind.name).faults(entry.data, entry.tag) if "must stand before" in f.message]
    order = next(
        (f.message.partition("(the order is ")[2].rstrip(")").split(", ") for f in faults if len(f.path) == 1), None
    )
    if order is None:
        return None
    starts = [entry.key_pos(key).line - 1 for key in entry.data]
    if len(set(starts)) < len(starts):
        return None
    blocks = {key: lines[a:b] for key, a, b in zip(entry.data, starts, [*starts[1:], end], strict=True)}
    rank = {key: n for n, key in enumerate(order)}
    return [line for key in sorted(blocks, key=lambda k: rank.get(k, len(rank))) for line in blocks[key]]


def main() -> None:
    """Rewrite the files named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        diags = Diagnostics()
        entries = load_spec(path, diags).entries
        lines = path.read_text().splitlines(keepends=True)
        bounds = [e.pos().line - 1 for e in entries] + [len(lines)]
        for entry, start, stop in reversed(list(zip(entries, bounds, bounds[1:], strict=False))):
            end = stop
            while end > start and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
                end -= 1
            if fixed := ordered(entry, lines, end):
                lines[start:end] = fixed
        path.write_text("".join(lines))


if __name__ == "__main__":
    main()
