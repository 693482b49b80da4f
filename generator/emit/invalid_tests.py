"""Reads specs/ops.yaml and what it includes, writes tests/generated/test_invalid_calls.py: calls that break a clause of `require`, and positions
out of range.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from ..model import Model
from ..op_entries import Lowering, OpEntry, Section
from ..render import header, literal, render

PATH = "tests/generated/test_invalid_calls.py"
_POSITIONS = frozenset(["index_of", "place_of"])
_MAKERS = frozenset(["I", "S"])
"""What makes a tensor of positions in `tests`."""


def emit(model: Model) -> dict[str, str]:
    """One test per clause, one per entry that takes positions; nothing when there is no operator spec."""
    entries: tuple[OpEntry, ...] = tuple(
        sorted((e for e in model.part("ops") if e.lowerings), key=lambda e: (e.family, e.id))
    )
    if not entries:
        return {}
    clauses = [text for e in entries for text in _clauses(e)]
    positions = [text for e in taking_positions(entries) if (text := _positions(e))]
    if not clauses and not positions:
        return {}
    head = header(PATH, "specs/ops.yaml")
    return {PATH: render("test_invalid_calls.py.j2", header=head, clauses=clauses, positions=positions)}


def _clauses(e: OpEntry) -> Iterator[str]:
    overloads = literal(tuple(w.schema.id for w in e.lowerings))
    # With the values of the entry in it, as the lowering says it.
    conditions = [section.text for section in e.lowerings[0].required]
    for clause in e.require:
        text = conditions.pop(0) if clause.form == "that" else clause.says
        if clause.bad:
            raises = f", raises={literal(clause.raises)}" if clause.raises else ""
            yield f"Clause({literal(e.id)}, {overloads}, {literal(text)}, {literal(clause.bad)}{raises})"


def _positions(e: OpEntry) -> str:
    """Those of the entry's own tests that have positions."""
    tests = tuple(t for t in e.tests if _MAKERS & set(_called(ast.parse(f"f({t}\n)", mode="eval"))))
    overloads = tuple(w.schema.id for w in e.lowerings)
    return f"Positions({literal(e.id)}, {literal(overloads)}, {literal(tests)})" if tests else ""


def taking_positions(entries: tuple[OpEntry, ...]) -> list[OpEntry]:
    """The entries whose elements are read or written at positions that data brings, also through the operators that they call."""
    lowerings = {w.schema.id: w for e in entries for w in e.lowerings}
    known: dict[str, bool] = {}
    return [e for e in entries if any(_takes(w.schema.id, lowerings, known) for w in e.lowerings)]


def _takes(overload: str, lowerings: Mapping[str, Lowering], known: dict[str, bool]) -> bool:
    if overload not in known:
        known[overload] = False  # no operator is lowered to itself
        found = lowerings.get(overload)
        known[overload] = (
            found is not None
            and not _unchecked(found)
            and (
                any(_from_data(s) for s in found.every_section())
                or any(_takes(name, lowerings, known) for name in sorted(found.function.calls))
            )
        )
    return known[overload]


def _from_data(section: Section) -> bool:
    """Whether it has a position that an argument's element brings: one made of coordinates and sizes is never out of range."""
    positions = [
        n.args[0]
        for n in section.nodes()
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in _POSITIONS
    ]
    # A tensor's subscript is printed as a read of its element; a list's is left as it is.
    return any(isinstance(n, ast.Subscript) and n in section.resolved for at in positions for n in ast.walk(at))


def _unchecked(w: Lowering) -> bool:
    """Whether the entry says that no call brings a position out of range."""
    raises = w.sections.get("raises")
    return raises is not None and isinstance(raises.tree, ast.Constant) and raises.tree.value == "nothing"


def _called(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
