"""Operators whose lowerings lead back to themselves: their compilation would not end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .diagnostics import Diagnostics, Pos
from .load import Entry
from .op_entries import Lowering


def check_recursion(
    made: Iterable[tuple[Entry, tuple[Lowering, ...]]], base: Iterable[Lowering], diags: Diagnostics
) -> None:
    """Report every cycle of calls in which an entry of `made` takes part, once; `base` are lowerings that those of `made` replace."""
    entries: dict[str, Entry] = {}
    calls = {w.schema.id: sorted(w.function.calls) for w in base}
    for entry, lowerings in made:
        for w in lowerings:
            entries[w.schema.id] = entry
            calls[w.schema.id] = sorted(w.function.calls)
    reported: set[str] = set()
    for name in sorted(entries):
        cycle = _cycle(name, calls)
        if not cycle or reported & set(cycle):
            continue
        reported |= set(cycle)
        entry = entries[name]
        others = [entries[n] for n in cycle if n in entries and entries[n] is not entry]
        through = f" through {', '.join(map(repr, cycle[1:]))}" if len(cycle) > 1 else ""
        diags.error(
            _pos(entry),
            f"'{name}' is lowered to itself{through}: compiling it would not end",
            also=[(_pos(e), "which is lowered here") for e in dict.fromkeys(others)],
        )


def _pos(entry: Entry) -> Pos:
    return entry.pos("body") if "body" in entry else entry.pos("op")


def _cycle(start: str, calls: Mapping[str, list[str]]) -> list[str]:
    """The shortest way from `start` back to it (without the last step), or nothing."""
    ways = [[start]]
    seen: set[str] = set()
    for way in ways:
        for name in calls.get(way[-1], ()):
            if name == start:
                return way
            if name not in seen:
                seen.add(name)
                ways.append([*way, name])
    return []
