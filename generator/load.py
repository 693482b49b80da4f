"""Strict YAML loading with positions: a spec file is a list of entries, each named by its first key.

Reads YAML 1.2 core scalars (`true`, `null`, `1e-5` is a number, `on` is text). Anchors, aliases, explicit tags and
duplicate keys are rejected. Data are plain dicts, lists and scalars; `Entry.pos` finds the place of any part, also
inside a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .diagnostics import Diagnostics, Pos, Source, did_you_mean
from .yaml_nodes import Node, inside, parse, resolve_plain

_WORD = re.compile(r"[A-Za-z_][\w.]*\w|[A-Za-z_]|[0-9][\w.]*")
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, eq=False)
class Entry:
    """One list item of a spec file: `data` (plain), its `tag` (first key) and `id` (that key's value), with
    positions.
    """

    data: dict[str, Any]
    source: Source
    node: Node = field(repr=False)

    @property
    def tag(self) -> str:
        """The first key, which says what kind of entry this is (`op`, `scalar`, `rule`, …)."""
        return next(iter(self.data), "")

    @property
    def id(self) -> str:
        """The value of the first key: the entry's name, as in `# spec: <id>`; a list is joined by commas."""
        return ", ".join(name for _, name in self.names()) or str(self.data.get(self.tag))

    def names(self) -> Iterator[tuple[KeyPath, str]]:
        """The names that the entry defines (its first key may hold a list of them, or map them to values), each with its path."""
        value = self.data.get(self.tag)
        if isinstance(value, str):
            yield (self.tag,), value
        elif isinstance(value, list):
            yield from (((self.tag, i), name) for i, name in enumerate(value) if isinstance(name, str))
        elif isinstance(value, dict):
            yield from (((self.tag, name), name) for name in value)

    @property
    def family(self) -> str:
        """The stem of the file that the entry stands in (`pointwise` for `specs/ops/pointwise.yaml`)."""
        return Path(self.source.name).stem

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __contains__(self, key: object) -> bool:
        return key in self.data

    def get(self, key: str, default: Any = None) -> Any:
        """`data.get`."""
        return self.data.get(key, default)

    def pos(self, *path: str | int, at: int | None = None) -> Pos:
        """The place of the value at `path` (keys and list indices), or of the nearest enclosing value that exists.

        With `at` the value must be a string: the place of its character `at` (0-based, `len` allowed), also through
        block scalars, folding, quotes and escapes.
        """
        node = self._find(path)
        if at is not None and node.kind == "text":
            line, col = inside(self.source, node, at)
            word = _WORD.match(self.source.lines[line - 1], col - 1) if line <= len(self.source.lines) else None
            return Pos(self.source, line, col, len(word.group()) if word else 1)
        return node.pos(self.source)

    def key_pos(self, *path: str | int) -> Pos:
        """The place of the key itself (not of its value) at `path`; the list item's place when the last part is an
        index.
        """
        parent = self._find(path[:-1])
        if parent.kind == "mapping":
            for key, _ in parent.pairs():
                if key.value == path[-1]:
                    return key.pos(self.source)
        return self.pos(*path)

    def name_pos(self, *path: str | int) -> Pos:
        """The place of one of `names()`, by its path."""
        return self.key_pos(*path) if isinstance(self.data[self.tag], dict) else self.pos(*path)

    def _find(self, path: KeyPath) -> Node:
        node = self.node
        for part in path:
            child: Node | None = None
            if node.kind == "mapping":
                child = next((v for k, v in node.pairs() if k.value == str(part)), None)
            elif node.kind == "list" and isinstance(part, int) and part < len(node.items or ()):
                child = (node.items or [])[part]
            if child is None:
                return node
            node = child
        return node


@dataclass(frozen=True, eq=False)
class Document:
    """A root spec file with everything that it includes, in file order."""

    name: str
    source: Source
    entries: tuple[Entry, ...] = ()
    sources: tuple[Source, ...] = ()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def tagged(self, tag: str) -> tuple[Entry, ...]:
        """The entries whose first key is `tag`."""
        return tuple(e for e in self.entries if e.tag == tag)


def load_spec(path: str | Path, diags: Diagnostics, *, name: str | None = None) -> Document:
    """Read a spec file and its includes; mistakes go to `diags`, what could be read is returned.

    A list item `- include: ops/*.yaml` stands for the entries of the files it matches (sorted by name, relative to the
    root file). `name` is how messages call the file (default: `path` as given).
    """
    path = Path(path)
    shown = name or path.as_posix()
    source, entries = _load_file(path, shown, diags)
    out: list[Entry] = []
    sources = [source]
    for entry in entries:
        if entry.tag != "include":
            out.append(entry)
            continue
        for sub in _included(entry, path.parent, diags):
            sub_name = (Path(shown).parent / sub.relative_to(path.parent)).as_posix()
            sub_source, sub_entries = _load_file(sub, sub_name, diags)
            sources.append(sub_source)
            for e in sub_entries:
                if e.tag == "include":
                    diags.error(e.pos(), "'include' may stand only in a root file, not in an included one")
                else:
                    out.append(e)
    return Document(shown, source, tuple(out), tuple(sources))


def load_text(text: str, name: str, diags: Diagnostics) -> Document:
    """As `load_spec`, from text (no includes)."""
    source = Source.of(name, text)
    return Document(name, source, tuple(_entries(source, diags)), (source,))


def _included(entry: Entry, folder: Path, diags: Diagnostics) -> list[Path]:
    pattern = entry.data["include"]
    where = entry.pos("include")
    for key in entry.data:
        if key != "include":
            diags.error(entry.key_pos(key), f"unknown key '{key}' beside 'include'")
    if not isinstance(pattern, str) or pattern.startswith("/") or ".." in Path(pattern).parts:
        diags.error(where, "'include' needs a relative file pattern inside the folder, such as ops/*.yaml")
        return []
    found = sorted((p for p in folder.glob(pattern) if p.is_file()), key=lambda p: p.as_posix())
    if not found:
        names = [p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*.yaml"))]
        diags.error(where, f"'{pattern}' matches no file" + did_you_mean(pattern, names))
    return found


def _load_file(path: Path, shown: str, diags: Diagnostics) -> tuple[Source, list[Entry]]:
    try:
        raw = path.read_bytes()
    except OSError as e:
        source = Source.of(shown, "")
        diags.error(Pos(source, 1, 1), f"cannot read the file: {e.strerror}")
        return source, []
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        before = raw[: e.start].decode("utf-8", "replace")
        source = Source.of(shown, raw.decode("utf-8", "replace"))
        line = before.count("\n") + 1
        pos = Pos(source, line, len(before) - before.rfind("\n"))
        diags.error(pos, f"expected UTF-8 text, found byte 0x{raw[e.start]:02x}")
        return source, []
    source = Source.of(shown, text)
    return source, list(_entries(source, diags))


def _entries(source: Source, diags: Diagnostics) -> Iterator[Entry]:
    """Parse one source; yields entries that are mappings with at least one key."""
    before = len(diags.mistakes)
    root = parse(source, diags)
    if root is None:
        if len(diags.mistakes) == before:
            diags.error(Pos(source, 1, 1), "expected a list of entries ('- op: …'), found an empty file")
        return
    if root.kind != "list":
        diags.error(root.pos(source), f"expected a list of entries ('- op: …'), found {root.describe()}")
        return
    for node in root.items or ():
        try:
            data = _construct(node, source, diags)
        except _Refused as e:
            diags.error(e.node.pos(source), e.node.refused)
            continue
        if not isinstance(data, dict) or not data:
            diags.error(node.pos(source), f"expected an entry with keys ('op: …'), found {node.describe()}")
            continue
        yield Entry(data, source, node)


class _Refused(Exception):
    """A construct of YAML that specs may not use; the whole entry is left out."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.refused)
        self.node = node


def _construct(node: Node, source: Source, diags: Diagnostics) -> Any:
    if node.refused:
        raise _Refused(node)
    if node.kind == "text":
        return node.value if node.style else resolve_plain(node.value)
    if node.kind == "list":
        return [_construct(item, source, diags) for item in node.items or ()]
    out: dict[str, Any] = {}
    first: dict[str, Node] = {}
    for key, value in node.pairs():
        if key.kind != "text":
            diags.error(key.pos(source), f"expected a name as key, found {key.describe()}")
        elif key.value in first:
            also = [(first[key.value].pos(source), "the first one is here")]
            diags.error(key.pos(source), f"duplicate key '{key.value}'", also=also)
        else:
            first[key.value] = key
            out[key.value] = _construct(value, source, diags)
    return out
