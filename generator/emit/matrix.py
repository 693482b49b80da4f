"""Reads specs/matrix.yaml, writes tests/generated/test_matrix.py (the axes, and the cells against eager) and docs/matrix.md."""

from __future__ import annotations

import ast
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..diagnostics import Diagnostics, did_you_mean, one_of
from ..load import Document, Entry
from ..model import Model
from ..render import header, literal, render
from ..tables import Condition, parse_condition

SPEC = "specs/matrix.yaml"
TESTS = "tests/generated/test_matrix.py"
PAGE = "docs/matrix.md"
AXES = ("mutation", "output", "history", "inputs", "shape")
LINES = ("before", "code", "after", "owner", "inputs", "arguments")
Members = Mapping[str, Mapping[str, Any]]


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
        alike = [] if self.impossible else [a for a in AXES if all(plane[a] == planes[0][a] for plane in planes)]
        others = [a for a in AXES if a not in alike]
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


def build(doc: Document, model: Model, diags: Diagnostics) -> Matrix | None:
    """Check that all axes are there, that lines are Python, that planes and conditions name members."""
    axes = {e.id: e for e in doc.tagged("axis")}
    for name in AXES:
        if name not in axes and doc.entries:
            diags.error(doc.entries[0].pos(), f"the axis '{name}' is missing")
    for entry in axes.values():
        _check_lines(entry, diags)
    if diags or not axes:
        return None
    domains = {name: tuple(axes[name]["members"]) for name in AXES}
    planes, impossible = [], []
    for entry in doc.tagged("matrix"):
        for k, plane in enumerate(entry["planes"]):
            planes.append((plane["doc"], _plane(entry, k, plane["cells"], domains, diags)))
        words = {m: literal(m) for members in domains.values() for m in members}
        for k, item in enumerate(entry.get("impossible") or ()):
            condition = parse_condition(entry, ("impossible", k, "when"), item["when"], domains, words, diags)
            if condition is not None:
                impossible.append((condition, item["why"]))
    if not planes:
        diags.error(doc.entries[0].pos(), "the entry 'matrix' with its planes is missing")
        return None
    docs = {name: axes[name]["doc"] for name in AXES}
    return Matrix(docs, {name: axes[name]["members"] for name in AXES}, tuple(planes), tuple(impossible))


def _check_lines(entry: Entry, diags: Diagnostics) -> None:
    for name, member in entry["members"].items():
        texts: list[tuple[tuple[str | int, ...], str]] = []
        texts += [((key, k), line) for key in LINES for k, line in enumerate(member.get(key, ()))]
        texts += [((key,), f"({member[key]})") for key in ("result", "block") if key in member]
        for path, text in texts:
            try:
                ast.parse(text)
            except SyntaxError as e:
                diags.error(entry.pos("members", name, *path), f"expected Python: {e.msg}")
        if entry.id == "output" and "result" not in member:
            diags.error(entry.key_pos("members", name), f"the output '{name}' has no result")
        if entry.id == "inputs" and "inputs" not in member:
            diags.error(entry.key_pos("members", name), f"the arguments '{name}' are not made")


def _plane(
    entry: Entry, k: int, cells: Mapping[str, list[str]], domains: Mapping[str, tuple[str, ...]], diags: Diagnostics
) -> dict[str, tuple[str, ...]]:
    for axis, members in cells.items():
        if axis not in domains:
            pos = entry.key_pos("planes", k, "cells", axis)
            diags.error(pos, f"expected {one_of(AXES)}, found '{axis}'{did_you_mean(axis, AXES)}")
            continue
        for j, m in enumerate(members):
            if m not in domains[axis]:
                pos = entry.pos("planes", k, "cells", axis, j)
                diags.error(pos, f"the axis '{axis}' has no member '{m}'{did_you_mean(m, domains[axis])}")
    return {axis: tuple(cells.get(axis, domains[axis])) for axis in AXES}


def emit(model: Model) -> dict[str, str]:
    """The tests and the page, or nothing when there is no such spec."""
    matrix: Matrix | None = model.part("matrix", None)
    if matrix is None:
        return {}
    by_plane, by_member = matrix.counts()
    values = {
        "matrix": matrix,
        "axes": AXES,
        "total": by_plane.total(),
        "by_plane": by_plane,
        "by_member": by_member,
        "lines": list(LINES),
        "cell": lambda text: text.replace("|", "\\|"),
    }
    return {
        TESTS: render("test_matrix.py.j2", header=header(TESTS, SPEC), literal=literal, **values),
        PAGE: render("matrix.md.j2", header=header(PAGE, SPEC), **values),
    }
