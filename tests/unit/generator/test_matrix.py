"""The matrix: its cells are counted without enumerating them, and what is missing in its spec is said."""

import itertools
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from opforge.errors import SpecError
from opforge.generator import run
from opforge.generator.emit.matrix import AXES, Matrix
from opforge.generator.tables import Condition


class Never(Condition):
    """A condition that holds for no cell, but has them looked at one by one."""

    def __init__(self) -> None:
        pass

    def holds(self, combination: object) -> bool:
        return False


class Alike(Condition):
    """A condition on two axes."""

    def __init__(self) -> None:
        pass

    def holds(self, combination: dict[str, str]) -> bool:  # type: ignore[override]
        return combination["inputs"] == combination["shape"]


def matrix(*planes: dict[str, str]) -> Matrix:
    """A matrix whose axes have the members a, b and c; a plane names those that it takes, all where it names none."""
    axes = {axis: {m: {} for m in "abc"} for axis in AXES}
    return Matrix({}, axes, tuple(("", {a: tuple(p.get(a, "abc")) for a in AXES}) for p in planes), ())


def enumerated(m: Matrix) -> tuple[Counter[int], Counter[tuple[str, str]]]:
    """What `counts` says, cell by cell."""
    first: dict[tuple[str, ...], int] = {}
    for k, (_, plane) in enumerate(m.planes):
        for cell in itertools.product(*(plane[a] for a in AXES)):
            if not any(c.holds(dict(zip(AXES, cell, strict=True))) for c, _ in m.impossible):
                first.setdefault(cell, k)
    return Counter(first.values()), Counter(pair for cell in first for pair in zip(AXES, cell, strict=True))


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
    for condition in (Never(), Alike()):
        conditional = replace(made, impossible=((condition, "for a test"),))
        assert conditional.counts() == enumerated(conditional)
    assert made.counts() == replace(made, impossible=((Never(), "for a test"),)).counts()


def test_missing_planes(tmp_path: Path) -> None:
    shutil.copytree(run.SPECS_DIR, tmp_path / "specs")
    spec = tmp_path / "specs" / "matrix.yaml"
    text = spec.read_text()
    spec.write_text(text[: text.index("\n- matrix:") + 1])
    with pytest.raises(SpecError, match="the entry 'matrix' with its planes is missing"):
        run.load_model(tmp_path / "specs")
