"""Matrices of test programs: their cells are counted without listing them, and mistakes in their specs are reported."""

import ast
import shutil
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from opforge.errors import SpecError
from opforge.generator import run
from opforge.generator.cells import Matrix
from opforge.generator.emit.matrix import AXES
from opforge.generator.tables import Condition
from tests.support.matrix import Matrix as Cells


def condition(text: str) -> Condition:
    """A condition over the axes."""
    return Condition(ast.parse(text, mode="eval").body, text)


def matrix(*planes: dict[str, str]) -> Matrix:
    """A matrix whose axes have the members a, b and c; a plane names those that it takes, all where it names none."""
    axes = {axis: {m: {} for m in "abc"} for axis in AXES}
    return Matrix({}, axes, tuple(("", {a: tuple(p.get(a, "abc")) for a in AXES}) for p in planes), ())


def enumerated(m: Matrix) -> tuple[Counter[int], Counter[tuple[str, str]]]:
    """What `counts` says, of the cells that the generated tests go through."""
    impossible = [lambda c=c, **cell: c.holds(cell) for c, _ in m.impossible]
    planes = [plane for _, plane in m.planes]
    found = [list(Cells(m.axes, planes[:k], impossible).cells()) for k in range(len(planes) + 1)]
    by_plane = Counter({k: len(after) - len(before) for k, (before, after) in enumerate(pairwise(found))})
    return +by_plane, Counter(pair for cell in found[-1] for pair in cell.items())


@pytest.mark.parametrize(
    "made",
    [
        matrix({}),
        matrix({"shape": "a"}, {"history": "ab"}, {"history": "b", "shape": "bc"}),
        matrix({"mutation": "a"}, {}, {"mutation": "b"}),
    ],
)
def test_counts_are_those_of_all_cells(made: Matrix) -> None:
    assert made.counts() == enumerated(made)
    for text in ("shape in (nothing,)", "inputs == a and shape in (a, b)"):
        conditional = replace(made, impossible=((condition(text), "for a test"),))
        assert conditional.counts() == enumerated(conditional)


def test_missing_planes(tmp_path: Path) -> None:
    shutil.copytree(run.SPECS_DIR, tmp_path / "specs")
    spec = tmp_path / "specs" / "matrix.yaml"
    text = spec.read_text()
    spec.write_text(text[: text.index("\n- matrix:") + 1])
    with pytest.raises(SpecError, match="the entry 'matrix' with its planes is missing"):
        run.load_model(tmp_path / "specs")


def hooks_with(tmp_path: Path, old: str, new: str) -> None:
    """Load specs in which the text of hooks.yaml is another."""
    shutil.copytree(run.SPECS_DIR, tmp_path / "specs")
    spec = tmp_path / "specs" / "hooks.yaml"
    text = spec.read_text()
    assert old in text
    spec.write_text(text.replace(old, new))
    run.load_model(tmp_path / "specs")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("- place: inner\n", "- place: leaf\n", "place 'leaf' is defined twice"),
        ("between: [u = hook(u)]", "between: [u = hook(u]", "expected Python"),
        (
            "graph: [crossed, compiled_parts]",
            "graph: [crosed]",
            "the axis 'graph' has no member 'crosed'; did you mean 'crossed'",
        ),
        ("graph: [crossed", "grph: [crossed", "found 'grph'; did you mean 'graph'"),
        ("backward == inner", "backward == outer", "found 'outer'"),
    ],
)
def test_mistakes_in_the_matrix_of_hooks(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        hooks_with(tmp_path, old, new)


def test_missing_entries_of_the_matrix_of_hooks(tmp_path: Path) -> None:
    text = (run.SPECS_DIR / "hooks.yaml").read_text()
    cells, backwards = text[text.index("\n- cells:") :], text[text.index("\n- backward:") : text.index("\n- cells:")]
    for k, (gone, message) in enumerate(
        [(cells, "the entry 'cells' with its planes is missing"), (backwards, "there is no backward")]
    ):
        with pytest.raises(SpecError, match=message):
            hooks_with(tmp_path / str(k), gone, "\n")
