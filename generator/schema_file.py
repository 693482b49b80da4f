"""The checked-in file of torch's operator schemas: those of every version that opforge supports, each line once.

    # versions: 2.11 2.12 2.13
    aten::relu(Tensor self) -> Tensor
    aten::cholesky(Tensor self, bool upper=False) -> Tensor  # until 2.12
    aten::linalg_polar(Tensor A) -> (Tensor U, Tensor P)  # since 2.13

A line without a mark stands for every version of the first line. `opforge schemas --refresh`, run with each version of torch, writes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["SchemaFile"]

_VERSIONS = "# versions: "
_MARK = "  # "


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@dataclass(frozen=True)
class SchemaFile:
    """Schema lines, and which of `versions` (oldest first) have them."""

    versions: tuple[str, ...]
    lines: dict[str, frozenset[str]]

    @classmethod
    @cache
    def read(cls, path: Path) -> SchemaFile:
        """The file at `path`. Raises ValueError, which names the line, where it is none."""
        first, *rest = path.read_text(encoding="utf-8").splitlines() or [""]
        if not first.startswith(_VERSIONS):
            raise ValueError(f"{path.name}:1: expected '{_VERSIONS}2.13 …', found {first[:60]!r}")
        versions = tuple(first.removeprefix(_VERSIONS).split())
        lines = {}
        for number, line in enumerate(rest, 2):
            schema, _, mark = line.partition(_MARK)
            try:
                lines[schema] = _marked(mark, versions)
            except ValueError as error:
                raise ValueError(f"{path.name}:{number}: {error}") from None
        return cls(versions, lines)

    def of(self, version: str) -> list[str]:
        """The schema lines of one version (`2.13`), sorted."""
        return sorted(line for line, known in self.lines.items() if version in known)

    @property
    def newest(self) -> list[str]:
        """The schema lines of the newest version."""
        return self.of(self.versions[-1])

    @property
    def older(self) -> list[str]:
        """The schema lines that the newest version has no more."""
        return sorted(line for line, known in self.lines.items() if self.versions[-1] not in known)

    def updated(self, version: str, lines: Iterable[str]) -> SchemaFile:
        """With `lines` as all that this version of torch has. What is said of other versions stays."""
        now = frozenset(lines)
        found = {line: known - {version} | ({version} if line in now else set()) for line, known in self.lines.items()}
        found |= {line: frozenset({version}) for line in now - found.keys()}
        versions = tuple(sorted({*self.versions, version}, key=_order))
        return SchemaFile(versions, {line: known for line, known in sorted(found.items()) if known})

    def text(self) -> str:
        """The file's text."""
        rows = (line + self.mark(line) for line in sorted(self.lines))
        return "".join(f"{row}\n" for row in (_VERSIONS + " ".join(self.versions), *rows))

    def mark(self, line: str) -> str:
        """`  # since 2.14` behind a line that not every version has, else nothing."""
        if words := self.span(self.lines[line]):
            return _MARK + words
        return ""

    def span(self, known: frozenset[str]) -> str:
        """A set of versions in words: `until 2.13`, `since 2.14`, `only 2.12 2.13`; empty for all of them."""
        here = tuple(v for v in self.versions if v in known)
        if here == self.versions:
            return ""
        if here == self.versions[: len(here)]:
            return f"until {here[-1]}"
        if here == self.versions[-len(here) :]:
            return f"since {here[0]}"
        return f"only {' '.join(here)}"


def _marked(mark: str, versions: tuple[str, ...]) -> frozenset[str]:
    if not mark:
        return frozenset(versions)
    word, *named = mark.split()
    unknown = [v for v in named if v not in versions]
    if word not in ("since", "until", "only") or not named or unknown or (word != "only" and len(named) != 1):
        raise ValueError(
            f"expected 'since V', 'until V' or 'only V …' of the versions {' '.join(versions)}, found {mark!r}"
        )
    if word == "only":
        return frozenset(named)
    at = versions.index(named[0])
    return frozenset(versions[at:] if word == "since" else versions[: at + 1])
