"""What is seen of a compilation from outside: the stages in `dump_dir`, and progress where it takes long."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import opforge
from opforge.errors import OpforgeWarning
from opforge.runtime import config
from opforge.runtime.observe import dump as dump_module
from opforge.runtime.observe import progress as progress_module
from opforge.runtime.observe.dump import Dump
from opforge.runtime.observe.progress import Progress


def program(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return torch.softmax(x * 1.0, -1)


def compiled(**options: Any) -> torch.Tensor:
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(program, backend="opforge", options=options)(torch.ones(3, 17))


@pytest.fixture(autouse=True)
def _warn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_module, "_warned", set())


# --- dump_dir

STAGES = [
    "01_dynamo_graph.py", "02_functional_graph.py", "03_rewritten_graph.py", "04_loop_ir.txt", "05_plan.txt", "06_kernels.cpp",
    "07_kernels_triton.py", "08_graph.py", "09_dispatch.py",
]  # fmt: skip


def test_every_stage_is_a_file_with_and_without_the_cache(tmp_path: Path) -> None:
    for _ in range(2):
        compiled(dump_dir=tmp_path / "dump", cache_dir=tmp_path / "cache")
    assert opforge.last_artifacts().cached
    first, second = sorted((tmp_path / "dump").iterdir())
    assert (first.name, second.name) == ("graph_0000", "graph_0001")
    assert sorted(p.name for p in first.iterdir()) == STAGES
    for name in STAGES:
        assert (first / name).read_text() == (second / name).read_text(), name
    expected = {
        "01_dynamo_graph.py": "torch.softmax(",
        "02_functional_graph.py": "aten.mul.Tensor",
        "03_rewritten_graph.py": "# mul_one at ",
        "04_loop_ir.txt": "reduce sum over",
        "05_plan.txt": "memory: arena of",
        "06_kernels.cpp": 'extern "C"',
        "07_kernels_triton.py": "@triton.jit",
        "08_graph.py": "def call(",
        "09_dispatch.py": "increment_version(x0)",
    }
    for name, text in expected.items():
        assert text in (first / name).read_text(), name


def test_stages_before_a_failure_are_there(tmp_path: Path) -> None:
    with pytest.warns(OpforgeWarning, match="runs eagerly"):
        compiled(dump_dir=tmp_path, cxx="g++-99")
    (folder,) = tmp_path.iterdir()
    assert [p.name for p in sorted(folder.iterdir())] == STAGES[:4]


def test_folder_that_cannot_be_written_gives_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results = [compiled(dump_dir=tmp_path / "file" / "dump") for _ in range(2)]
    ours = [str(w.message) for w in seen if w.category is OpforgeWarning]
    assert len(ours) == 1, ours
    assert ours[0].startswith(f"opforge: cannot write the stages of compiled graphs to {tmp_path}/file/dump: ")
    for result in results:
        torch.testing.assert_close(result, torch.full((3, 17), 1 / 17))


def test_a_number_that_another_process_took_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "graph_0001").mkdir()
    (tmp_path / "graph_0001" / "theirs").write_text("")
    d = Dump(str(tmp_path))
    d.text("a.txt", lambda: "a")
    assert d.write() == tmp_path / "graph_0002"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph_0001", "graph_0002"]


def test_nothing_is_made_without_a_folder() -> None:
    d = Dump("")
    d.text("a.txt", lambda: pytest.fail("made"))
    assert d.write() is None


# --- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    yield io.StringIO()
    assert not progress_module._showing.locked()


def test_quick_compilations_and_files_stay_silent(stream: io.StringIO) -> None:
    terminal = Terminal()
    for p in (
        Progress("auto", stream=terminal, delay_s=60),
        Progress("off", stream=Terminal(), delay_s=0),
        Progress("auto", stream=stream, delay_s=0),
    ):
        with p.stage("build"):
            p.kernels(0, 3)
        p.close()
    assert terminal.getvalue() == stream.getvalue() == ""


def test_stages_that_begin_before_the_line_is_there_print_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While rich was imported each of them printed a line, which stayed on the terminal."""
    terminal, made, go_on = Terminal(), threading.Event(), threading.Event()
    make = Progress._make_line

    def slowly(self: Progress) -> None:
        made.set()
        assert go_on.wait(10)
        make(self)

    monkeypatch.setattr(Progress, "_make_line", slowly)
    p = Progress("auto", stream=terminal, delay_s=0)
    assert made.wait(10)
    with p.stage("one"), p.stage("two"):
        assert terminal.getvalue() == ""
        go_on.set()
        until(lambda: "opforge: compiling (two" in terminal.getvalue())
    p.close()
    assert "compiling (one" not in terminal.getvalue()
    assert not progress_module._showing.locked()


class Odd:
    """What a program may have put in the place of its errors' stream."""

    def write(self, text: str) -> int:
        raise KeyError(text)


@pytest.mark.parametrize("stream", [None, Odd(), object()])
@pytest.mark.parametrize("setting", ["auto", "on"])
def test_streams_that_take_nothing(
    setting: str, stream: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    p = Progress(setting, delay_s=0)
    if setting == "on":
        until(lambda: p._shown)
    with p.stage("one"):
        p.kernels(1, 2)
    p.close()
    assert capsys.readouterr().out == ""
    assert not progress_module._showing.locked()


def test_a_terminal_gets_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    p = Progress("auto", stream=terminal, delay_s=0)
    with p.stage("build"):
        p.kernels(0, 3)
        until(lambda: "compiling (build, 0/3 kernels)" in terminal.getvalue())
        p.kernels(3, 3)
        until(lambda: "3/3 kernels" in terminal.getvalue())
    p.close()
    assert terminal.getvalue().endswith("\x1b[2K")  # the last thing is to clear the line
    assert not progress_module._showing.locked()


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_plain_lines_without_a_terminal_or_without_rich(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is Terminal:
        for name in ("rich.console", "rich.progress"):
            monkeypatch.setitem(sys.modules, name, None)
    stream = kind()
    p = Progress("on", stream=stream, delay_s=0)
    until(lambda: stream.getvalue())
    with p.stage("lower"):
        pass
    with p.stage("build"):
        p.kernels(2, 5)
    p.close()
    p.kernels(5, 5)  # after the end: nothing
    lines = stream.getvalue().splitlines()
    assert [line.rpartition(", ")[0] for line in lines] == [
        "opforge: compiling (graph)",
        "opforge: compiling (lower)",
        "opforge: compiling (build)",
        "opforge: compiling (build, 2/5 kernels)",
    ]


def test_a_stream_that_closes_harms_nothing(stream: io.StringIO) -> None:
    p = Progress("on", stream=stream, delay_s=0)
    until(lambda: stream.getvalue())
    stream.close()
    with p.stage("build"):
        p.kernels(1, 2)
    p.close()
    Progress("auto", stream=stream, delay_s=0).close()


def test_one_line_at_a_time() -> None:
    first, second = io.StringIO(), io.StringIO()
    p = Progress("on", stream=first, delay_s=0)
    until(lambda: first.getvalue())
    q = Progress("on", stream=second, delay_s=0)
    with q.stage("build"):
        time.sleep(0.05)
    q.close()
    p.close()
    assert second.getvalue() == ""
    assert not progress_module._showing.locked()


def test_compiling_shows_its_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(progress_module, "DELAY_S", 0.0)
    compiled(progress=True, cache_dir=tmp_path)
    shown = capsys.readouterr().err
    assert "opforge: compiling (build, 0/1 kernels), " in shown
    compiled(progress=False, cache=False)
    assert capsys.readouterr().err == ""


def test_the_setting_takes_words_for_yes_and_no() -> None:
    for value, meant in ((True, "on"), ("1", "on"), ("off", "off"), (False, "off"), ("auto", "auto")):
        assert config.from_options({"progress": value}).progress == meant


def logged(setting: str) -> str:
    """What a process with that TORCH_LOGS prints."""
    text = (
        "import torch, opforge\n"
        "def f(x):\n    x.mul_(2)\n    return torch.softmax(x * 1.0, -1)\n"
        "torch.compile(f, backend='opforge')(torch.ones(3, 17))\n"
        "torch.compile(lambda s: s * 2, backend='opforge')(torch.ones(2, device='meta'))\n"
    )
    env = {**os.environ, "TORCH_LOGS": setting}
    done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_torch_logs_prints_a_line_for_each_graph() -> None:
    said = logged("opforge")
    assert re.search(r"a graph: 1 kernel, eager kernels: none, arena \d+ bytes", said), said
    assert "a graph runs eagerly: UnsupportedError: a tensor is on the device meta" in said
    assert "def call" not in said


def test_torch_logs_prints_the_wrappers() -> None:
    said = logged("+opforge")
    for stage in ("dynamo_graph.py", "functional_graph.py", "plan.txt", "kernels.cpp", "graph.py", "dispatch.py"):
        assert re.search(rf"\] {re.escape(stage)}$", said, re.MULTILINE), f"{stage} is missing in {said}"
