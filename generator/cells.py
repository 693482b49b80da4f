"""Matrices of programs: axes with members, planes that say which cells there are, conditions of cells that mean nothing."""

from __future__ import annotations

import ast
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .diagnostics import Diagnostics, did_you_mean, one_of
from .load import Entry, KeyPath
from .render import literal
from .tables import Condition, parse_condition

Members = Mapping[str, Mapping[str, Any]]
Domains = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Matrix:
    """The axes with their docs; planes as (doc, members of every axis); conditions of cells that mean nothing, with reasons."""

    docs: Mapping[str, str]
    axes: Mapping[str, Members]
    planes: tuple[tuple[str, Mapping[str, tuple[str, ...]]], ...]
    impossible: tuple[tuple[Condition, str], ...]

    def counts(self) -> tuple[Counter[int], Counter[tuple[str, str]]]:
        """How many cells there are of every plane that are in none before, and of every member of an axis."""
        planes = [plane for _, plane in self.planes]
        # Axes that are alike in all planes multiply what there is of the others; a condition may be about any axis.
        alike = [] if self.impossible else [a for a in self.axes if all(plane[a] == planes[0][a] for plane in planes)]
        others = [a for a in self.axes if a not in alike]
        first: dict[tuple[str, ...], int] = {}
        for k, plane in reversed(list(enumerate(planes))):
            first |= dict.fromkeys(itertools.product(*(plane[a] for a in others)), k)
        by_plane: Counter[int] = Counter()
        by_member: Counter[tuple[str, str]] = Counter()
        each = math.prod(len(planes[0][a]) for a in alike)
        for cell, k in first.items():
            members = dict(zip(others, cell, strict=True))
            if not any(condition.holds(members) for condition, _ in self.impossible):
                by_plane[k] += each
                by_member.update(dict.fromkeys(members.items(), each))
        for a in alike:
            by_member.update({(a, m): by_plane.total() // len(planes[0][a]) for m in planes[0][a]})
        return by_plane, by_member


def read_matrix(
    entries: Iterable[Entry], docs: Mapping[str, str], axes: Mapping[str, Members], diags: Diagnostics
) -> Matrix | None:
    """The matrix of the entries with `planes` and `impossible`; None if there is none."""
    domains = {name: tuple(members) for name, members in axes.items()}
    planes, impossible = [], []
    for entry in entries:
        for k, plane in enumerate(entry["planes"]):
            planes.append((plane["doc"], _plane(entry, k, plane["cells"], domains, diags)))
        words = {m: literal(m) for members in domains.values() for m in members}
        for k, item in enumerate(entry.get("impossible") or ()):
            condition = parse_condition(entry, ("impossible", k, "when"), item["when"], domains, words, diags)
            if condition is not None:
                impossible.append((condition, item["why"]))
    return Matrix(docs, axes, tuple(planes), tuple(impossible)) if planes else None


def _plane(
    entry: Entry, k: int, cells: Mapping[str, list[str]], domains: Domains, diags: Diagnostics
) -> dict[str, tuple[str, ...]]:
    for axis, members in cells.items():
        if axis not in domains:
            pos = entry.key_pos("planes", k, "cells", axis)
            diags.error(pos, f"expected {one_of(tuple(domains))}, found '{axis}'{did_you_mean(axis, domains)}")
            continue
        for j, m in enumerate(members):
            if m not in domains[axis]:
                pos = entry.pos("planes", k, "cells", axis, j)
                diags.error(pos, f"the axis '{axis}' has no member '{m}'{did_you_mean(m, domains[axis])}")
    return {axis: tuple(cells.get(axis, domains[axis])) for axis in domains}


def check_python(entry: Entry, path: KeyPath, text: str, diags: Diagnostics) -> None:
    """Report text at `path` of an entry that is not valid Python."""
    try:
        ast.parse(text)
    except SyntaxError as e:
        diags.error(entry.pos(*path), f"expected Python: {e.msg}")
