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

import yaml

from .diagnostics import Diagnostics, Pos, Source, did_you_mean

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_WORDS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
_WORDS |= {".inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}
_TAG_NAMES = ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge", "value")
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{t}" for t in _TAG_NAMES)
MAX_DEPTH = 40
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, eq=False)
class Entry:
    """One list item of a spec file: `data` (plain), its `tag` (first key) and `id` (that key's value), with
    positions.
    """

    data: dict[str, Any]
    source: Source
    node: yaml.Node = field(repr=False)

    @property
    def tag(self) -> str:
        """The first key, which says what kind of entry this is (`op`, `scalar`, `rule`, …)."""
        return next(iter(self.data), "")

    @property
    def id(self) -> str:
        """The value of the first key: the entry's name, used as provenance (`# spec: <id>`); several are joined by commas."""
        return ", ".join(name for _, name in self.names()) or str(self.data.get(self.tag))

    def names(self) -> Iterator[tuple[KeyPath, str]]:
        """The names that the entry defines (its first key may hold a list of them), each with its path."""
        value = self.data.get(self.tag)
        if isinstance(value, str):
            yield (self.tag,), value
        elif isinstance(value, list):
            yield from (((self.tag, i), name) for i, name in enumerate(value) if isinstance(name, str))

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

        With `at` the value must be a string: the place of its character number `at` (0-based, `len` allowed), through
        block scalars, folding, quotes and escapes.
        """
        node = self._find(path)
        if at is not None and isinstance(node, yaml.ScalarNode):
            line, col = _inside(self.source, node, at)
            return Pos(self.source, line, col)
        return _node_pos(self.source, node)

    def key_pos(self, *path: str | int) -> Pos:
        """The place of the key itself (not of its value) at `path`; the list item's place when the last part is an
        index.
        """
        parent = self._find(path[:-1])
        if isinstance(parent, yaml.MappingNode):
            for key, _ in parent.value:
                if key.value == path[-1]:
                    return _node_pos(self.source, key)
        return self.pos(*path)

    def _find(self, path: KeyPath) -> yaml.Node:
        node = self.node
        for part in path:
            child: yaml.Node | None = None
            if isinstance(node, yaml.MappingNode):
                child = next((v for k, v in node.value if k.value == str(part)), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                child = node.value[part]
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
    root = _compose(source, diags)
    if root is None:
        return
    if not isinstance(root, yaml.SequenceNode):
        diags.error(_node_pos(source, root), f"expected a list of entries ('- op: …'), found {_kind(root)}")
        return
    seen: set[int] = set()
    for node in root.value:
        before = len(diags.mistakes)
        data = _construct(node, source, diags, seen, 0)
        if not isinstance(data, dict) or not data:
            if len(diags.mistakes) == before:
                diags.error(_node_pos(source, node), f"expected an entry with keys ('op: …'), found {_kind(node)}")
            continue
        yield Entry(data, source, node)


def _compose(source: Source, diags: Diagnostics) -> yaml.Node | None:
    if "\0" in source.text:
        line = source.text[: source.text.index("\0")].count("\n") + 1
        diags.error(Pos(source, line, 1), "the file holds a NUL character")
        return None
    # libyaml composes recursively in C: a hostile nesting would overflow its stack before any limit of ours is reached.
    if (deep := _too_deep(source)) is not None:
        diags.error(deep, f"nested deeper than {MAX_DEPTH} levels")
        return None
    try:
        root = yaml.compose(source.text, Loader=_Loader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line, col = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        context = f" {e.context}" if e.context else ""
        diags.error(Pos(source, line, col), f"not valid YAML:{context} {e.problem or ''}".rstrip())
        return None
    except yaml.reader.ReaderError as e:
        before = source.text[: e.position]
        col = len(before) - before.rfind("\n")
        diags.error(Pos(source, before.count("\n") + 1, col), f"not valid YAML: {e.reason}")
        return None
    if root is None:
        diags.error(Pos(source, 1, 1), "expected a list of entries ('- op: …'), found an empty file")
    return root


def _too_deep(source: Source) -> Pos | None:
    depth = 0
    for match in re.finditer(r"[\[{\]}]|^ *(- +){40,}", source.text, re.MULTILINE):
        token = match.group()
        depth += 1 if token in "[{" else -1 if token in "]}" else MAX_DEPTH
        depth = max(depth, 0)
        if depth > MAX_DEPTH * 10:
            line = source.text.count("\n", 0, match.start()) + 1
            return Pos(source, line, match.start() - source.text.rfind("\n", 0, match.start()))
    return None


def _construct(node: yaml.Node, source: Source, diags: Diagnostics, seen: set[int], depth: int) -> Any:
    if id(node) in seen:
        diags.error(_node_pos(source, node), "aliases (*name) are not allowed: write the value again")
        return None
    seen.add(id(node))
    if node.tag not in _PLAIN_TAGS:
        diags.error(_node_pos(source, node), f"explicit tags are not allowed, found {node.tag!r}")
        return None
    if depth > MAX_DEPTH:
        diags.error(_node_pos(source, node), f"nested deeper than {MAX_DEPTH} levels")
        return None
    if isinstance(node, yaml.ScalarNode):
        return resolve_plain(node.value) if not node.style else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, source, diags, seen, depth + 1) for item in node.value]
    out: dict[str, Any] = {}
    first: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            diags.error(_node_pos(source, key), f"expected a name as key, found {_kind(key)}")
            continue
        if key.value in first:
            also = [(_node_pos(source, first[key.value]), "the first one is here")]
            diags.error(_node_pos(source, key), f"duplicate key '{key.value}'", also=also)
            continue
        first[key.value] = key
        out[key.value] = _construct(value, source, diags, seen, depth + 1)
    return out


def resolve_plain(text: str) -> Any:
    """The value of an unquoted YAML scalar by the YAML 1.2 core schema (`0x1F`, `1e-5`, `true`, `null`; `yes` is
    text).
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INT.match(text):
        return int(text, 0)
    if _FLOAT.match(text):
        return float(text)
    return text


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return f"'{node.value}'" if node.value else "nothing"


def _node_pos(source: Source, node: yaml.Node) -> Pos:
    start, end = node.start_mark, node.end_mark
    one_line = isinstance(node, yaml.ScalarNode) and start.line == end.line
    return Pos(source, start.line + 1, start.column + 1, max(1, end.column - start.column) if one_line else 1)


def _inside(source: Source, node: yaml.ScalarNode, at: int) -> tuple[int, int]:
    """Line and column (1-based) of character `at` of a scalar's value."""
    line, col = node.start_mark.line, node.start_mark.column
    if node.style == "|":
        row = node.value.count("\n", 0, at)
        start = node.value.rfind("\n", 0, at) + 1
        body = source.lines[line + 1 : node.end_mark.line + 1]
        return line + 2 + row, _block_indent(source.lines[line][col:], body, node) + at - start + 1
    if node.style == ">":
        body = source.lines[line + 1 : node.end_mark.line + 1]
        line, col = line + 1, _block_indent(source.lines[line][col:], body, node)
    elif node.style in ("'", '"'):
        col += 1
    return _align(source.lines, line, col, node.value, at, node.style or "")


def _block_indent(header: str, body: tuple[str, ...], node: yaml.ScalarNode) -> int:
    explicit = re.match(r"[|>][-+]?([1-9])", header)
    if explicit:
        first = node.value.split("\n", 1)[0]
        return len(body[0]) - len(first) if body else 0
    return next((len(text) - len(text.lstrip(" ")) for text in body if text.strip()), 0)


def _align(lines: tuple[str, ...], line: int, col: int, value: str, at: int, style: str) -> tuple[int, int]:
    """Walk value and source side by side: folded line breaks, doubled quotes and escapes take several source
    characters.
    """
    for i in range(at):
        text = lines[line] if line < len(lines) else ""
        char = value[i] if i < len(value) else ""
        if style == '"' and text[col : col + 1] == "\\":
            width = {"x": 4, "u": 6, "U": 10}.get(text[col + 1 : col + 2], 2)
            if col + 1 < len(text):
                col += width
                continue
        if style == "'" and char == "'":
            col += 2
            continue
        if char in " \n" and not text[col:].strip():
            if i + 1 < len(value) and value[i + 1] == "\n":
                line, col = line + 1, 0
                continue
            line, col = line + 1, 0
            while line < len(lines) and not lines[line].strip():
                line += 1
            col = len(lines[line]) - len(lines[line].lstrip()) if line < len(lines) else 0
            continue
        col += 1
    return line + 1, col + 1
