"""Where the specs hold expressions and choices, and the wrong variants of each."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opforge.generator.load import Entry
from opforge.generator.model import Model

from .mutate import changes, normal

KeyPath = tuple[str | int, ...]

NO_EXPRESSIONS = {
    "ops": ("op", "doc", "kind", "symbol", "complex", "test_dtypes", "tests", "no_edges", "unspecified", "why", "out", "operands", "promoted",
            "row_bytes", "product", "any_strides", "raises", "bad", "says"),
    "rewrites": ("rule", "doc", "device", "test"),
    "decompositions": ("decomposition", "doc", "function", "parameters", "correction", "refusal", "unfold", "inline", "launch", "control",
            "runs", "same_dtype", "not_floating", "not_bool", "bool_with_bools", "most_dims", "not_empty", "not_negative", "viewed",
            "fills", "dtype_of", "layout_of", "elementwise_of", "preserved_of", "given"),
    "random": ("random", "doc"),
    "mutations": ("enum", "struct", "table", "step", "role", "inverse", "doc", "why", "over", "gives", "members", "op", "reads", "writes", "type",
            "say", "default", "then"),
    "scalars": ("scalar", "reduction", "scan", "doc", "args", "result", "torch", "symbol", "zero_sign"),
}  # fmt: skip
"""Keys whose values are no expressions."""
SYMMETRIC = ("broadcast", "promoted_dtype", "greatest", "least", "same_dtype")
"""Functions of the specs, other than scalars, whose first two arguments may be exchanged."""
SPELLINGS = ("cpp", "triton", "float", "int", "bool", "any")
"""Keys of a scalar whose values are put into other expressions as they are."""
CHOICES: Mapping[str, Sequence[str]] = {
    "reduce": ("sum", "prod", "max", "min", "any", "all"),
    "promote": ("default", "float", "bool", "first", "none"),
    "scan": ("sum", "prod", "max", "min"),
}
"""Keys whose value is one of a few words."""


@dataclass(frozen=True)
class Mutant:
    """A wrong variant of one entry: the value at `path` is `new` in place of `old`; without a path the entry is missing.
    `inside`: the functions in whose arguments the change is.
    """

    kind: str
    file: str
    entry: str
    path: KeyPath
    what: str
    old: Any
    new: Any
    inside: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """A name that stays the same while entry and change do."""
        text = "\0".join((self.kind, self.entry, repr(self.path), str(self.old), str(self.new)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def of(self, entry: Entry) -> Entry | None:
        """The entry with the change; None where it is missing."""
        if not self.path:
            return None
        data = copy.deepcopy(entry.data)
        inner: Any = data
        for part in self.path[:-1]:
            inner = inner[part]
        inner[self.path[-1]] = self.new
        return replace(entry, data=data)

    @property
    def gone(self) -> list[str]:
        """The functions that the old expression calls and the new one does not."""
        return sorted(_called(str(self.old)) - _called(str(self.new)))

    def show(self) -> str:
        """Entry, place and change on one line, with what stands around the change."""
        where = ".".join(str(p) for p in self.path)
        if not self.path:
            return f"{self.entry} ({self.what})"
        old, new = _difference(normal(str(self.old)), str(self.new))
        return f"{self.entry} {where} ({self.what}): `{old}` → `{new}`"


def _called(text: str) -> set[str]:
    return set(re.findall(r"([A-Za-z_]\w*)\(", text))


_AROUND = 40


def _difference(old: str, new: str) -> tuple[str, str]:
    """The parts of two texts that differ, with some characters around them."""
    old, new = " ".join(old.split()), " ".join(new.split())
    start = next((k for k, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    most = min(len(old), len(new)) - start
    end = next((k for k in range(most) if old[-1 - k] != new[-1 - k]), most)
    first = max(0, start - _AROUND)
    left, right = "…" if first else "", "…" if end > _AROUND else ""
    shown = [t[first : len(t) - max(0, end - _AROUND)] for t in (old, new)]
    return f"{left}{shown[0]}{right}", f"{left}{shown[1]}{right}"


def mutants(model: Model, kind: str) -> Iterator[Mutant]:
    """Every mutant of the specs of one kind, entry by entry."""
    commutative = {e.id for e in model.entries("scalars") if e.get("commutative")}
    for entry in model.entries(kind):
        yield from mutants_of(entry, kind, commutative)


def mutants_of(entry: Entry, kind: str, commutative: set[str]) -> Iterator[Mutant]:
    """Every mutant of one entry."""
    yield from _others(entry, kind)
    for path, text in _strings(entry.data, ()):
        keys = [p for p in path if isinstance(p, str)]
        if any(k in NO_EXPRESSIONS[kind] for k in keys):
            continue
        name = keys[-1]
        given = (kind, entry.source.name, entry.id, path)
        if name in CHOICES and text in CHOICES[name]:
            for other in CHOICES[name]:
                if other != text:
                    yield Mutant(*given, "choice", text, other)
            continue
        if "<{" in text:  # a template's argument is no expression of Python
            continue
        for change in changes(text, {*commutative, *SYMMETRIC}, body="\n" in text or text.startswith("return ")):
            if entry.get("commutative") and name in SPELLINGS and change.what == "arguments exchanged":
                continue
            new = f"({change.text})" if kind == "scalars" and name in SPELLINGS else change.text
            yield Mutant(*given, change.what, text, new, change.inside)


def _others(entry: Entry, kind: str) -> Iterator[Mutant]:
    """Mutants of what is no expression: an entry that is missing, another result of a rule of a table, a flag."""
    given = (kind, entry.source.name, entry.id)
    if kind in ("decompositions", "random"):
        yield Mutant(*given, (), "entry dropped", entry.tag, "")
    if entry.tag == "table":
        results = [rule["then"] for rule in entry["rules"]]
        for k, then in enumerate(results):
            new = next((other for other in results[k + 1 :] + results[:k] if other != then), None)
            if new is not None:
                yield Mutant(*given, ("rules", k, "then"), "another result", then, new)
            for j in range(len(then)) if isinstance(then, list) else ():
                yield Mutant(*given, ("rules", k, "then"), "step dropped", then, [*then[:j], *then[j + 1 :]])
    if entry.tag == "scalar" and len(entry["args"]) > 1 and not entry.get("commutative") and entry["args"][1] == "same":
        yield Mutant(*given, ("commutative",), "flag set", False, True)


def _strings(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings(inner, (*path, key))
    elif isinstance(value, list):
        for k, inner in enumerate(value):
            yield from _strings(inner, (*path, k))
