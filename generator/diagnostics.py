"""Positions in spec files and the collector of mistakes: every mistake of a run is shown at once, with its source
line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from ..errors import SpecError

_WIDTH = 160


@dataclass(frozen=True, eq=False)
class Source:
    """The text of one spec file. `name` is how messages call it (POSIX, relative where the caller gave it so)."""

    name: str
    text: str
    lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, text: str) -> Source:
        """A source whose lines are split as YAML splits them (only CR, LF and CRLF end a line)."""
        return cls(name, text, tuple(text.replace("\r\n", "\n").replace("\r", "\n").split("\n")))


@dataclass(frozen=True)
class Pos:
    """A place in a source: 1-based line and column, and how many characters from there are meant."""

    source: Source
    line: int
    col: int
    length: int = 1

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line}:{self.col}"

    @property
    def key(self) -> tuple[str, int, int]:
        """Sorts positions by file, then by place."""
        return (self.source.name, self.line, self.col)

    def excerpt(self) -> str:
        """The source line with carets below it, or nothing when the line is empty or past the end."""
        if not 0 < self.line <= len(self.source.lines):
            return ""
        raw = self.source.lines[self.line - 1]
        if not raw.strip():
            return ""
        start = min(max(self.col, 1), len(raw) + 1) - 1
        if len(raw) > _WIDTH:
            cut = max(0, start - _WIDTH // 2)
            raw, start = ("…" if cut else "") + raw[cut : cut + _WIDTH], start - cut + (1 if cut else 0)
        carets = "^" * max(1, min(self.length, len(raw) - start))
        pad = "".join("\t" if c == "\t" else " " for c in raw[:start])
        return f"{self.line:5} | {raw.rstrip()}\n      | {pad}{carets}"


@dataclass(frozen=True)
class Mistake:
    """One mistake: where, what, and other places that take part in it (`also`: position and why it matters)."""

    pos: Pos
    message: str
    also: tuple[tuple[Pos, str], ...] = ()
    level: str = "error"

    def render(self) -> str:
        """The block that the user sees, without a final newline."""
        parts = [f"{self.pos}: {self.level}: {self.message}", self.pos.excerpt()]
        for pos, why in self.also:
            parts += [f"{pos}: note: {why}", pos.excerpt()]
        return "\n".join(p for p in parts if p)


@dataclass
class Diagnostics:
    """Collects mistakes; checks go on after one so that all are reported in one run."""

    mistakes: list[Mistake] = field(default_factory=list)

    def error(self, pos: Pos, message: str, *, also: Sequence[tuple[Pos, str]] = ()) -> None:
        """Record a mistake; the run will fail, but goes on to find the others."""
        self.mistakes.append(Mistake(pos, message, tuple(also)))

    def __bool__(self) -> bool:
        return bool(self.mistakes)

    def render(self) -> str:
        """All blocks in source order, each once, and a last line with the count."""
        blocks = list(dict.fromkeys(m.render() for m in sorted(self.mistakes, key=lambda m: m.pos.key)))
        count = len(blocks)
        return "\n".join([*blocks, f"{count} error{'s' if count != 1 else ''}"])

    def raise_if_any(self) -> None:
        """Raise `SpecError` with the rendered text when anything was recorded."""
        if self.mistakes:
            raise SpecError(self.render())


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest valid name, or an empty string when none is near."""
    near = nearest(str(name), valid)
    return f"; did you mean '{near}'?" if near else ""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name nearest to `name`, or None. Ties go to the alphabetically first, so that messages are stable."""
    names = sorted(set(valid))
    folded: dict[str, str] = {}
    for v in names:
        folded.setdefault(v.lower(), v)
    # Two letters exchanged is the commonest slip, and difflib rates it below a letter left out.
    for v in folded:
        if sorted(v) == sorted(name.lower()):
            return folded[v]
    close = get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def one_of(names: Iterable[str], limit: int = 24) -> str:
    """`'a', 'b' or 'c'` for messages; long lists are cut."""
    items = [f"'{n}'" for n in names]
    if len(items) > limit:
        return ", ".join(items[:limit]) + f" … ({len(items) - limit} more)"
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + f" or {items[-1]}" if items else "nothing"
