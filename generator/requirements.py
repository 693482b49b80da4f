"""`require`: what a call must fulfil, else eager raises. Checks the clauses of an entry; `check_overload.py` types them.

A clause is a condition that is decided while lowering (`that`), one of every element of an argument (`each`), or the name of one that the body
states (`demanded`). Each has calls that break it (`bad`), which become tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .diagnostics import did_you_mean, one_of
from .entry_texts import EntryTexts
from .load import Entry
from .op_entries import Requirement

KEY = "require"
DEVICE = "is_on_gpu"
"""A condition that asks this may hold of every call on a processor, where the tests of `bad` calls run."""
Path = tuple[str | int, ...]


def clauses(entry: Entry) -> tuple[Mapping[str, Any], ...]:
    """The clauses as they are written."""
    return tuple(entry.get(KEY) or ())


def paths(entry: Entry) -> Iterator[Path]:
    """Where the expressions of the clauses stand."""
    for k, clause in enumerate(clauses(entry)):
        if "that" in clause:
            yield KEY, k, "that"
        for name in clause.get("each") or ():
            yield KEY, k, "each", name


def calls(entry: Entry) -> Iterator[tuple[Path, str]]:
    """The calls that break a clause, with their places."""
    for k, clause in enumerate(clauses(entry)):
        for n, text in enumerate(clause.get("bad") or ()):
            yield (KEY, k, "bad", n), text


def requirements(entry: Entry) -> tuple[Requirement, ...]:
    """The clauses in order, each `each` once for every argument that it names."""
    found = []
    for clause in clauses(entry):
        form = next(key for key in ("that", "each", "demanded") if key in clause)
        told = clause[form]
        text = ", ".join(told) if isinstance(told, dict) else " ".join(str(told).split())
        raises, says = (str(clause.get(key) or "") for key in ("raises", "says"))
        found.append(Requirement(form, text, raises, says, tuple(map(str, clause.get("bad") or ()))))
    return tuple(found)


@dataclass
class Demands(ast.NodeTransformer):
    """Puts the type and the text of a clause into the calls `demanded(t, holds, clause)` of a body, and reports those that name none."""

    texts: EntryTexts
    path: Path

    def __post_init__(self) -> None:
        named = [c for c in clauses(self.texts.entry) if "demanded" in c]
        self.named = {str(c["demanded"]): c for c in named}
        self.met: set[str] = set()

    def fill(self, tree: list[ast.stmt]) -> list[ast.stmt]:
        """The statements with the clauses in them."""
        asks = "demanded" in self.texts.sources[self.path].text
        made = [self.visit(statement) for statement in tree] if asks else tree
        for k, clause in enumerate(clauses(self.texts.entry)):
            if self.named.get(str(clause.get("demanded"))) is clause and clause["demanded"] not in self.met:
                self.texts.error((KEY, k, "demanded"), f"the body demands no '{clause['demanded']}'")
        return made

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Name) and node.func.id == "demanded"):
            return node
        source = self.texts.text(self.path)
        assert source is not None
        name = node.args[2] if len(node.args) == 3 else None
        clause: Mapping[str, Any] = {}
        if not isinstance(name, ast.Name) or node.keywords:
            source.error(node, "expected demanded(tensor, condition, clause), with the name of a clause of 'require'")
        elif name.id not in self.named:
            hint = did_you_mean(name.id, self.named) or (f"; there is {one_of(self.named)}" if self.named else "")
            source.error(name, f"no clause of 'require' is called '{name.id}'{hint}")
        else:
            self.met.add(name.id)
            clause = self.named[name.id]
        # After a mistake too, so that it is reported once.
        texts = [ast.copy_location(ast.Constant(str(clause.get(key))), node) for key in ("raises", "says")]
        node.args, node.keywords = [*node.args[:2], *texts], []
        return node


def check_clauses(texts: EntryTexts) -> None:
    """Refuse clauses that no kind of entry has use for, and those without a call that breaks them."""
    names: set[str] = set()
    for k, clause in enumerate(clauses(texts.entry)):
        if "demanded" in clause:
            name = str(clause["demanded"])
            if texts.kind != "composite":
                texts.error((KEY, k, "demanded"), "only the body of kind 'composite' demands something by name")
            if name in names:
                texts.error((KEY, k, "demanded"), f"two clauses are called '{name}'")
            names.add(name)
        if not clause.get("bad") and DEVICE not in str(clause.get("that")):
            texts.error((KEY, k), "missing key 'bad': calls that break the clause, which become tests")
