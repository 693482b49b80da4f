"""Torch's operator schemas, read from the checked-in snapshot `torch_schemas.txt` so that the generator never imports
torch.

The snapshot holds the schemas of every supported version (`schema_file`); `opforge schemas --refresh` brings those of the
installed torch up to date. Only the operators asked for are parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from .diagnostics import did_you_mean, nearest
from .schema_file import SchemaFile

SNAPSHOT = Path(__file__).with_name("torch_schemas.txt")
OWN = Path(__file__).with_name("own_schemas.txt")
_HEAD = re.compile(r"(?P<ns>\w+)::(?P<name>\w+)(?:\.(?P<overload>\w+))?\((?P<args>.*)\) -> (?P<returns>.*)\Z")
_MARK = re.compile(r"[,\"'()\[\]]")
_ALIAS = re.compile(r"\((?P<set>[^)]*)\)")


class TorchArg(NamedTuple):
    """One argument or return: torch's type text without alias marks (`Tensor`, `int[1]?`, `Scalar`), default as text
    or None.
    """

    name: str
    type: str
    default: str | None = None
    kwarg_only: bool = False
    alias: str = ""
    writes: bool = False

    @property
    def optional(self) -> bool:
        """Whether None may be passed."""
        return self.type.endswith("?")


@dataclass(frozen=True)
class TorchSchema:
    """One overload as torch registers it; `overload` is `default` when torch names none."""

    namespace: str
    name: str
    overload: str
    args: tuple[TorchArg, ...]
    returns: tuple[TorchArg, ...]
    text: str = field(compare=False, default="")

    @property
    def id(self) -> str:
        """`aten.add.Tensor`, or `aten.relu` for a default overload's short form's owner (`aten.relu.default`)."""
        return f"{self.namespace}.{self.name}.{self.overload}"

    @property
    def mutates(self) -> bool:
        """Whether any argument is written."""
        return any(a.writes for a in self.args)

    @property
    def is_view(self) -> bool:
        """Whether a return aliases an argument that is not written."""
        return any(r.alias and not r.writes for r in self.returns)

    @property
    def is_out(self) -> bool:
        """Whether it is an `out=` variant (a written keyword-only argument)."""
        return any(a.writes and a.kwarg_only for a in self.args)

    @property
    def functional(self) -> bool:
        """Whether it writes nothing and returns fresh tensors."""
        return not self.mutates and not self.is_view

    def arg(self, name: str) -> TorchArg | None:
        """The argument called `name`."""
        return next((a for a in self.args if a.name == name), None)


class TorchSchemas:
    """Operators by name: `get("aten.add")` gives all overloads in name order, `get("aten.add.Tensor")` one.

    `older` are lines that the newest supported torch has no more: an overload is found by its full name there, and a packet only where
    the newest torch has none of that name. Of an overload whose arguments were renamed there is the newest form alone.
    `versions` are those of torch that all these are of, oldest first.
    """

    def __init__(self, lines: Iterable[str], older: Iterable[str] = (), versions: tuple[str, ...] = ()) -> None:
        self.versions = versions
        self._lines: dict[str, list[str]] = {}
        self._parsed: dict[str, tuple[TorchSchema, ...]] = {}
        for line in lines:
            if packet := _packet(line):
                self._lines.setdefault(packet, []).append(line.rstrip("\n"))
        self._older: dict[str, str] = {}
        newest = {line.partition("(")[0] for group in self._lines.values() for line in group}
        for line in older:
            if _packet(line) and (head := line.partition("(")[0]) not in newest:
                self._older[head] = line.rstrip("\n")

    @classmethod
    def snapshot(cls, path: Path = SNAPSHOT) -> TorchSchemas:
        """The checked-in snapshot, and the operators that opforge registers itself."""
        file = SchemaFile.read(path)
        return cls([*file.newest, *OWN.read_text(encoding="utf-8").splitlines()], file.older, file.versions)

    def extended(self, lines: Iterable[str]) -> TorchSchemas:
        """These and more schema lines (a user's `torch.library` operators)."""
        own = [line for group in self._lines.values() for line in group]
        return TorchSchemas([*own, *lines], self._older.values(), self.versions)

    @cached_property
    def older(self) -> tuple[TorchSchema, ...]:
        """The overloads that only older supported versions have."""
        return tuple(parse_schema(line) for line in self._older.values())

    def packets(self) -> tuple[str, ...]:
        """All names without overload (`aten.add`), sorted."""
        return tuple(sorted(self._lines))

    def overloads(self, packet: str) -> tuple[TorchSchema, ...]:
        """All overloads of `aten.add`, sorted by overload name; empty when torch has no such operator."""
        if packet not in self._parsed:
            schemas = [parse_schema(line) for line in self._lines.get(packet, ())]
            self._parsed[packet] = tuple(sorted(schemas, key=lambda s: s.overload))
        return self._parsed[packet]

    def get(self, op: str) -> tuple[TorchSchema, ...]:
        """The overloads that a spec's `op:` names: `aten.add` all, `aten.add.Tensor` one; empty when there is none."""
        parts = op.split(".")
        if len(parts) == 2:
            return self.overloads(op) or tuple(s for s in self.older if f"{s.namespace}.{s.name}" == op)
        if len(parts) == 3:
            found = tuple(s for s in self.overloads(".".join(parts[:2])) if s.overload == parts[2])
            return found or tuple(s for s in self.older if s.id == op)
        return ()


def _packet(line: str) -> str:
    """`aten.add` of a schema line; empty where it is none."""
    ns, _, rest = line.partition("::")
    return f"{ns}.{re.split(r'[.(]', rest, maxsplit=1)[0]}" if rest else ""


def parse_schema(text: str) -> TorchSchema:
    """Parse one line of torch's schema syntax. Raises ValueError when it is none."""
    match = _HEAD.match(text.strip())
    if not match:
        raise ValueError(f"not an operator schema: {text!r}")
    kwarg_only = False
    args = []
    for part in _split(match["args"]):
        if part == "*":
            kwarg_only = True
        else:
            args.append(_parse_arg(part, kwarg_only))
    returns = match["returns"].strip()
    if returns.startswith("(") and returns.endswith(")"):
        returns = returns[1:-1]
    rets = tuple(_parse_arg(part, False) for part in _split(returns))
    return TorchSchema(match["ns"], match["name"], match["overload"] or "default", tuple(args), rets, text.strip())


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for mark in _MARK.finditer(text):
        char = mark[0]
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
        elif not depth:
            parts.append(text[start : mark.start()])
            start = mark.end()
    return [p for part in (*parts, text[start:]) if (p := part.strip())]


@cache
def _parse_arg(text: str, kwarg_only: bool) -> TorchArg:
    body, eq, default = text.partition("=")
    alias = _ALIAS.search(body)
    marks = alias["set"] if alias else ""
    body = _ALIAS.sub("", body, count=1).strip() if alias else body.strip()
    type_, _, name = body.rpartition(" ")
    if not type_:
        type_, name = name, ""
    label = re.split(r"[!\s]", marks)[0]
    return TorchArg(name, type_, default if eq else None, kwarg_only, label, "!" in marks)


def matching(name: str | None) -> list[str]:
    """The schema lines of the snapshot whose operator has `name` (dots as in Python, or `::`) in it, with the versions of those that not every
    version has; all for None.
    """
    file = SchemaFile.read(SNAPSHOT)
    heads = ((line, line.partition("(")[0]) for line in file.lines)
    return [
        line + file.mark(line)
        for line, head in heads
        if name is None or name.replace(".", "::", 1) in head or name in head
    ]


def nearest_operator(name: str) -> str:
    """`; did you mean 'aten.softplus'?` for the operator named most like `name` (with or without a namespace), or an empty string."""
    packets = TorchSchemas.snapshot().packets()
    if "." in name:
        return did_you_mean(name, packets)
    short = {packet.partition(".")[2]: packet for packet in packets}
    near = nearest(name, short)
    return f"; did you mean '{short[near]}'?" if near else ""


def torch_lines(namespaces: Iterable[str] = ("aten", "prims")) -> list[str]:
    """Schemas registered in the installed torch, as sorted text lines. Imports torch."""
    from ..runtime.torch_compat import operator_schemas

    return operator_schemas(tuple(namespaces))


def refreshed() -> SchemaFile:
    """The snapshot with the schemas of the installed torch in the place of what it has for that version. Imports torch."""
    from ..runtime.torch_compat import minor_version

    return SchemaFile.read(SNAPSHOT).updated(minor_version(), torch_lines())
