"""What the examples share says what it does while it does it, also where there is no terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def shared() -> Iterator[ModuleType]:
    """The module that the examples import by its name alone."""
    sys.path.insert(0, str(EXAMPLES))
    import side_by_side

    yield side_by_side
    sys.path.remove(str(EXAMPLES))
    del sys.modules["side_by_side"]


class Flushed(io.StringIO):
    """A stream of which only what was flushed can be seen."""

    seen = ""

    def flush(self) -> None:
        self.seen = self.getvalue()


def test_a_step_is_told_before_it_begins(shared: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving bars wrote nothing to a file or a pipe until all was over."""
    stream = Flushed()
    monkeypatch.setattr(shared, "console", Console(file=stream, width=120))
    during: list[str] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            during.append(stream.seen.splitlines()[-1] if stream.seen else "")
        return x + 1

    runs = shared.compare(program, (torch.ones(4),), rounds=2, names=())
    assert list(runs) == ["eager"]
    assert during[0] == ""  # eager's own result, before the first step
    lines = stream.seen.splitlines()
    assert [line for line in lines if not line.startswith("  done in ")] == [
        "Dynamo's first trace in this process …",
        "timing, interleaved …",
    ]
    assert "timing, interleaved …" in during
    assert len(lines) == 4


def test_on_a_terminal_bars_move(shared: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(shared, "console", Console(file=stream, width=120, force_terminal=True))
    with shared.Steps() as steps, steps.step("counting", 3) as advance:
        advance()
        advance()
    assert "counting" in stream.getvalue()
    assert "3/3" in stream.getvalue()
    assert "done in" not in stream.getvalue()
