"""YAML text as a tree of nodes that know their places.

Built from libyaml's events, not by its composer: that one recurses in C, so that a hostile file would end the process,
and it forgets where an alias stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from .diagnostics import Diagnostics, Pos, Source

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]+\Z")
_BASED = re.compile(r"0x[0-9a-fA-F]+\Z|0o[0-7]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_WORDS: dict[str, Any] = {"": None, "~": None}
for _name, _value in (("null", None), ("true", True), ("false", False)):
    _WORDS |= {_name: _value, _name.capitalize(): _value, _name.upper(): _value}
_WORDS |= {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}
_YAML_HINTS = {
    "mapping values are not allowed": " (text with ': ' in it must be quoted)",
    "cannot start any token": " (text that begins with @, %, ` or a tab must be quoted)",
    "violates indentation": " (indent with spaces)",
    "did not find expected ',' or": " (is a bracket, brace or comma missing?)",
}
MAX_DEPTH = 40
MAX_DIGITS = 100


@dataclass(slots=True, eq=False)
class Node:
    """A `text` (`value`; `style` is its quote, `|` or `>`), a `list` or a `mapping` (`items`: key, value, key, …).

    `start` and `end` are 0-based (line, column). `refused` says why specs may not use what stands here.
    """

    kind: str
    start: tuple[int, int]
    end: tuple[int, int]
    value: str = ""
    style: str = ""
    items: list[Node] | None = None
    refused: str = ""

    def pairs(self) -> Iterable[tuple[Node, Node]]:
        """Keys with their values."""
        items = self.items or []
        return zip(items[::2], items[1::2], strict=True)

    def describe(self) -> str:
        """For messages: `a list`, `a mapping`, the text in quotes, or `nothing`."""
        if self.kind == "text":
            return f"'{self.value}'" if self.value else "nothing"
        return f"{'an' if self.kind == 'alias' else 'a'} {self.kind}"

    def pos(self, source: Source) -> Pos:
        """Where it begins, with its length when it is text on one line."""
        one_line = self.kind == "text" and self.start[0] == self.end[0]
        length = max(1, self.end[1] - self.start[1]) if one_line else 1
        return Pos(source, self.start[0] + 1, self.start[1] + 1, length)


def parse(source: Source, diags: Diagnostics) -> Node | None:
    """The root node of a file of one document; None after a mistake in the YAML itself, or for an empty file."""
    if "\0" in source.text:
        line = source.text[: source.text.index("\0")].count("\n") + 1
        diags.error(Pos(source, line, 1), "the file holds a NUL character")
        return None
    try:
        root, documents = _build(source, diags)
    except yaml.MarkedYAMLError as e:
        _report(e, source, diags)
        return None
    except yaml.reader.ReaderError as e:
        before = source.text[: e.position]
        pos = Pos(source, before.count("\n") + 1, len(before) - before.rfind("\n"))
        diags.error(pos, f"not valid YAML: {e.reason}")
        return None
    if len(documents) > 1:
        diags.error(Pos(source, documents[1] + 1, 1), "a spec file is one document, found a second one ('---')")
        return None
    return root


def _build(source: Source, diags: Diagnostics) -> tuple[Node | None, list[int]]:
    """The first document's root, and the lines where documents begin."""
    root: Node | None = None
    stack: list[Node] = []
    documents: list[int] = []
    events: Any = yaml.parse(source.text, Loader=_Loader)
    for event in events:
        name = type(event).__name__
        if name == "DocumentStartEvent":
            documents.append(event.start_mark.line)
            if len(documents) > 1:
                break
            continue
        if name in ("SequenceEndEvent", "MappingEndEvent"):
            stack.pop().end = (event.end_mark.line, event.end_mark.column)
            continue
        if name not in _KINDS:
            continue
        start = (event.start_mark.line, event.start_mark.column)
        node = Node(_KINDS[name], start, (event.end_mark.line, event.end_mark.column))
        if name == "AliasEvent":
            node.refused = f"aliases (*{event.anchor}) are not allowed: write the value out again"
        elif event.tag is not None and event.tag != "!":
            node.refused = f"tags are not allowed, found '{event.tag}'"
        if name == "ScalarEvent":
            node.value, node.style = event.value, event.style or ""
            if not node.style and len(node.value) > MAX_DIGITS and (_INT.match(node.value) or _BASED.match(node.value)):
                node.refused = f"a number has at most {MAX_DIGITS} digits, found one of {len(node.value)} characters"
        if stack:
            items = stack[-1].items
            assert items is not None
            items.append(node)
        else:
            root = node
        if name in ("SequenceStartEvent", "MappingStartEvent"):
            node.items = []
            stack.append(node)
            if len(stack) > MAX_DEPTH:
                diags.error(node.pos(source), f"nested deeper than {MAX_DEPTH} levels")
                return None, documents
    return root, documents


_KINDS = {"ScalarEvent": "text", "AliasEvent": "alias", "SequenceStartEvent": "list", "MappingStartEvent": "mapping"}


def _report(e: yaml.MarkedYAMLError, source: Source, diags: Diagnostics) -> None:
    mark = e.problem_mark or e.context_mark
    line, col = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    problem = str(e.problem or "the text ends too early")
    hint = next((text for part, text in _YAML_HINTS.items() if part in problem), "")
    also = []
    if e.context and e.context_mark and e.context_mark.line + 1 != line:
        start = Pos(source, e.context_mark.line + 1, e.context_mark.column + 1)
        also = [(start, e.context.removeprefix("while ") + " that begins here")]
    diags.error(Pos(source, line, col), f"not valid YAML: {problem}{hint}", also=also)


def resolve_plain(text: str) -> Any:
    """The value of unquoted text by YAML 1.2's core schema: `0x1F`, `1e-5`, `true`, `null`; but `yes` is text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.match(text):
        return int(text)
    if _BASED.match(text):
        return int(text, 0)
    if _FLOAT.match(text):
        return float(text)
    return text


def inside(source: Source, node: Node, at: int) -> tuple[int, int]:
    """Line and column (1-based) of character `at` of a text node's value."""
    assert isinstance(node.value, str)
    line, col = node.start
    if node.style == "|":
        row = node.value.count("\n", 0, at)
        start = node.value.rfind("\n", 0, at) + 1
        body = source.lines[line + 1 : node.end[0] + 1]
        return line + 2 + row, _block_indent(source.lines[line][col:], body, node) + at - start + 1
    if node.style == ">":
        body = source.lines[line + 1 : node.end[0] + 1]
        line, col = line + 1, _block_indent(source.lines[line][col:], body, node)
    elif node.style in ("'", '"'):
        col += 1
    return _align(source.lines, line, col, node.value, at, node.style)


def _block_indent(header: str, body: tuple[str, ...], node: Node) -> int:
    if re.match(r"[|>][-+]?[1-9]", header):
        assert isinstance(node.value, str)
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
