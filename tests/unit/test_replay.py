"""The texts by which two commits are compared: all three kinds, for each machine, the same each time, and a difference is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._dynamo.exc import BackendCompilerFailed

from opforge.tools.replay.__main__ import renames, show
from opforge.tools.replay.programs import PROGRAMS
from opforge.tools.replay.record import MACHINES, texts


@pytest.mark.parametrize("machine", MACHINES)
def test_texts_are_whole_and_the_same_each_time(machine: str) -> None:
    first = texts(PROGRAMS["gallery/softmax"], machine)
    (text,) = first.values()
    assert text.index("--- plan") < text.index("--- kernels") < text.index("--- wrapper")
    assert ("@triton.jit" in text) == (machine == "sm_90")
    assert "def call(" in text
    assert texts(PROGRAMS["gallery/softmax"], machine) == first


def test_the_backward_and_the_graphs_of_a_branch_are_there() -> None:
    titles = " ".join(texts(PROGRAMS["control/branches"], "avx2"))
    assert "backward" in titles
    assert "branch then" in titles


def test_a_kernel_that_fails_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opforge.tools.replay.record.render_unit", lambda *_, **__: 1 / 0)
    with pytest.raises(BackendCompilerFailed, match="ZeroDivisionError"):
        texts(PROGRAMS["gallery/softmax"], "avx2")


def test_what_differs_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, text in (("old", "kernel team\nteams"), ("new", "kernel cooperative\nteams")):
        (tmp_path / folder / "avx2").mkdir(parents=True)
        (tmp_path / folder / "avx2" / "one.txt").write_text(text)
    assert not show(tmp_path / "old", tmp_path / "new", {})
    assert "1 texts: 1 differ" in capsys.readouterr().out
    assert show(tmp_path / "old", tmp_path / "new", {"team": "cooperative"})
    (tmp_path / "new" / "avx2" / "two.txt").write_text("")
    assert not show(tmp_path / "old", tmp_path / "new", {"team": "cooperative"})


def test_a_line_of_renames_that_is_not_two_words(tmp_path: Path) -> None:
    file = tmp_path / "renames.txt"
    file.write_text("# old new\nteam cooperative\n")
    assert renames(file) == {"team": "cooperative"}
    file.write_text("team\n")
    with pytest.raises(SystemExit, match=r"renames\.txt:1: expected an old word and a new one"):
        renames(file)
