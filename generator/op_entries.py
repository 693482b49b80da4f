"""What a checked operator entry is: its overloads, their functions and sections, as the printers take them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from .expr.function import Function
from .expr.printer import As
from .expr.walk import nodes
from .torch_schemas import TorchSchema

WITHOUT_LOWERING = ("extern", "decomposed")
"""Kinds of entries that have no function: the eager kernel runs, or torch's own kernel is recorded by what it calls."""


@dataclass(frozen=True)
class Section:
    """A checked expression (or a body) and how its nodes print."""

    tree: ast.expr | list[ast.stmt]
    resolved: dict[ast.AST, As]
    text: str = ""

    def nodes(self) -> Iterator[ast.AST]:
        """All expressions and statements of it."""
        return nodes(*(self.tree if isinstance(self.tree, list) else [self.tree]))

    @functools.cached_property
    def called(self) -> frozenset[str]:
        """Names of the functions that it calls."""
        return frozenset(n.func.id for n in self.nodes() if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))


@dataclass(frozen=True)
class Requirement:
    """A clause of `require`: how it is stated (`that`, `each` or `demanded`), its condition or the arguments or the name, what its violation raises
    and says (of `that` eager's kernel decides), and calls that break it.
    """

    form: str
    text: str
    raises: str
    says: str
    bad: tuple[str, ...]


@dataclass
class Lowering:
    """One overload's function, checked: everything that the printer needs."""

    schema: TorchSchema
    function: Function
    sections: dict[str, Section] = field(default_factory=dict)
    lets: list[tuple[str, Section]] = field(default_factory=list)
    withs: list[tuple[str, Section]] = field(default_factory=list)
    cases: list[tuple[Section | None, Section]] = field(default_factory=list)
    promoted: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    words: dict[str, str] = field(default_factory=dict)
    required: list[Section] = field(default_factory=list)
    """Conditions that are decided while lowering."""
    each: list[tuple[str, Section, str, str]] = field(default_factory=list)
    """Arguments with a condition of each element, and what is raised and said where it does not hold."""

    def every_section(self) -> list[Section]:
        """All that computes, and its conditions but those of `require`."""
        return [*self.sections.values(), *(s for _, s in (*self.lets, *self.withs)), *(s for _, s in self.cases)]


@dataclass(frozen=True)
class OpEntry:
    """One entry: the overloads that it covers, and their functions (none for kinds `WITHOUT_LOWERING`)."""

    id: str
    doc: str
    kind: str
    family: str
    symbol: str
    schemas: tuple[TorchSchema, ...]
    lowerings: tuple[Lowering, ...]
    tests: tuple[str, ...]
    test_dtypes: tuple[str, ...]
    unspecified: bool
    why: str
    complex: bool = False
    out: tuple[tuple[str, str], ...] = ()
    row_bytes: int = 0
    product: tuple[tuple[str, tuple[int, ...]], ...] = ()
    any_strides: bool = False
    opaque: tuple[int, ...] = ()
    require: tuple[Requirement, ...] = ()
    no_edges: str = ""
