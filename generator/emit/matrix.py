"""Reads specs/matrix.yaml, writes tests/generated/test_matrix.py (the axes, and the cells against eager) and docs/matrix.md."""

from __future__ import annotations

from ..cells import Matrix, check_python, read_matrix
from ..diagnostics import Diagnostics
from ..load import Document, Entry
from ..model import Model
from ..render import header, literal, render

SPEC = "specs/matrix.yaml"
TESTS = "tests/generated/test_matrix.py"
PAGE = "docs/matrix.md"
AXES = ("mutation", "output", "history", "inputs", "shape")
LINES = ("before", "code", "after", "owner", "inputs", "arguments")


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
    docs = {name: axes[name]["doc"] for name in AXES}
    matrix = read_matrix(doc.tagged("matrix"), docs, {name: axes[name]["members"] for name in AXES}, diags)
    if matrix is None:
        diags.error(doc.entries[0].pos(), "the entry 'matrix' with its planes is missing")
    return matrix


def _check_lines(entry: Entry, diags: Diagnostics) -> None:
    for name, member in entry["members"].items():
        texts: list[tuple[tuple[str | int, ...], str]] = []
        texts += [((key, k), line) for key in LINES for k, line in enumerate(member.get(key, ()))]
        texts += [((key,), f"({member[key]})") for key in ("result", "block") if key in member]
        for path, text in texts:
            check_python(entry, ("members", name, *path), text, diags)
        if entry.id == "output" and "result" not in member:
            diags.error(entry.key_pos("members", name), f"the output '{name}' has no result")
        if entry.id == "inputs" and "inputs" not in member:
            diags.error(entry.key_pos("members", name), f"the arguments '{name}' are not made")


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
