"""One entry for operators that differ in a few values: it is read as one entry for each of them.

    - op:
        aten.max_unpool2d: {dims: 2}
        aten.max_unpool3d: {dims: 3}

What stands beside an operator are values, which its expressions call by name, and keys of its own (`OWN`) in place of the entry's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .diagnostics import Pos
from .load import Entry, KeyPath
from .yaml_nodes import Node

OWN = ("doc", "tests")


@dataclass(frozen=True, eq=False)
class Part(Entry):
    """The entry of one operator (`name`) of several: its own keys (`own`), its `values`, and those that only others of them have (`missing`)."""

    name: str = ""
    own: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    def value_pos(self, name: str) -> Pos:
        """The place of a value's name."""
        return _key(super()._find((self.tag, self.name)), name).pos(self.source)

    def _find(self, path: KeyPath) -> Node:
        if path and path[0] == self.tag:
            return _key(super()._find((self.tag,)), self.name)
        return super()._find((self.tag, self.name, *path) if path and path[0] in self.own else path)


def parts(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries, and for each that maps operators to values one for each operator."""
    for e in entries:
        told = e.get(e.tag)
        if not isinstance(told, dict):
            yield e
            continue
        every = dict.fromkeys(key for beside in told.values() for key in beside if key not in OWN)
        for name, beside in told.items():
            own = {key: value for key, value in beside.items() if key in OWN}
            values = {key: value for key, value in beside.items() if key not in OWN}
            missing = tuple(key for key in every if key not in values)
            yield Part({**e.data, e.tag: name, **own}, e.source, e.node, name, tuple(own), values, missing)


def values_of(entry: Entry) -> Mapping[str, Any]:
    """The values that the entry's expressions may name."""
    return entry.values if isinstance(entry, Part) else {}


def _key(mapping: Node, name: str) -> Node:
    return next(key for key, _ in mapping.pairs() if key.value == name)


class Fill(ast.NodeTransformer):
    """Puts values where a tree names them, as literals, or as the name of what is called; `used` are their names."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values, self.used = values, set[str]()

    def visit_Call(self, node: ast.Call) -> ast.expr:
        called = node.func
        if isinstance(called, ast.Name) and (text := self.values.get(called.id)) is not None and is_name(text):
            self.used.add(called.id)
            node.func = _named(text, called)
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.values or not isinstance(node.ctx, ast.Load):
            return node
        self.used.add(node.id)
        return _literal(self.values[node.id], node)


def is_name(value: Any) -> bool:
    """Whether a value is the name of something to call, such as 'exp' or 'sum.dim_IntList'."""
    return isinstance(value, str) and all(part.isidentifier() for part in value.split("."))


def _named(text: str, place: ast.expr) -> ast.expr:
    first, *rest = text.split(".")
    named: ast.expr = ast.copy_location(ast.Name(first, ast.Load()), place)
    for part in rest:
        named = ast.copy_location(ast.Attribute(named, part, ast.Load()), place)
    return named


def _literal(value: Any, place: ast.expr) -> ast.expr:
    if isinstance(value, list):
        return ast.copy_location(ast.List([_literal(v, place) for v in value], ast.Load()), place)
    return ast.copy_location(ast.Constant(value), place)
