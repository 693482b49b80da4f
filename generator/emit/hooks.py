"""Reads specs/hooks.yaml, writes tests/generated/test_hooks.py (cells against eager, event by event) and docs/hooks.md."""

from __future__ import annotations

from ..cells import Matrix, check_python, read_matrix
from ..diagnostics import Diagnostics
from ..load import Document, Entry
from ..model import Model
from ..render import cell, header, literal, render

SPEC = "specs/hooks.yaml"
TESTS = "tests/generated/test_hooks.py"
PAGE = "docs/hooks.md"
AXES = {
    "hook": "What is hung on a tensor.",
    "place": "On which tensors.",
    "graph": "What the tensors are computed by.",
    "backward": "How the backward runs.",
}
LINES = ("before", "between", "after", "first", "last", "code")


def build(doc: Document, model: Model, diags: Diagnostics) -> Matrix | None:
    """Check that all axes have members, that lines are Python, that planes and conditions name members."""
    entries: dict[str, dict[str, Entry]] = {axis: {} for axis in AXES}
    for entry in doc.entries:
        if entry.tag not in AXES:
            continue
        entries[entry.tag][entry.id] = entry
        for key in LINES:
            if key in entry:
                check_python(entry, (key,), "\n".join(entry[key]), diags)
    for axis, members in entries.items():
        if not members and doc.entries:
            diags.error(doc.entries[0].pos(), f"there is no {axis}")
    if diags or not doc.entries:
        return None
    axes = {
        axis: {name: {k: v for k, v in e.data.items() if k != axis} for name, e in members.items()}
        for axis, members in entries.items()
    }
    matrix = read_matrix(doc.tagged("cells"), AXES, axes, diags)
    if matrix is None:
        diags.error(doc.entries[0].pos(), "the entry 'cells' with its planes is missing")
    return matrix


def emit(model: Model) -> dict[str, str]:
    """The tests and the page, or nothing when there is no such spec."""
    matrix: Matrix | None = model.part("hooks", None)
    if matrix is None:
        return {}
    by_plane, by_member = matrix.counts()
    values = {
        "matrix": matrix,
        "total": by_plane.total(),
        "by_plane": by_plane,
        "by_member": by_member,
        "lines": list(LINES),
        "cell": cell,
    }
    return {
        TESTS: render("test_hooks.py.j2", header=header(TESTS, SPEC), literal=literal, **values),
        PAGE: render("hooks.md.j2", header=header(PAGE, SPEC), **values),
    }
