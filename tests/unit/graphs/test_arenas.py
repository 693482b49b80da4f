"""Memory of intermediate values while somebody records a CUDA graph: without a GPU, by a place that stands for a stream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from opforge.runtime.execute.cuda import Workspaces, our_recording
from opforge.runtime.execute.support import CPU, swap_arena, waiting_arena


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspaces]:
    monkeypatch.setattr(Workspaces, "place", lambda self: CPU)
    before = swap_arena(CPU, None)
    yield Workspaces(lambda memory: memory[:8], 1024)
    swap_arena(CPU, before)


def run(workspaces: Workspaces) -> tuple[object, Tensor]:
    arena, space = workspaces.take()
    workspaces.give(arena)
    return arena, space


def recording(monkeypatch: pytest.MonkeyPatch, now: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now)


def test_runs_take_turns_with_one_arena(workspaces: Workspaces, monkeypatch: pytest.MonkeyPatch) -> None:
    recording(monkeypatch, False)
    arena, space = run(workspaces)
    assert run(workspaces) == (arena, space)
    assert waiting_arena(CPU) is arena


def test_a_graph_of_the_user_has_memory_of_its_own(workspaces: Workspaces, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that were recorded on one stream may be replayed side by side on others."""
    recording(monkeypatch, False)
    waiting, _ = run(workspaces)
    recording(monkeypatch, True)
    found = [run(workspaces) for _ in range(2)]
    assert len({waiting, *(arena for arena, _ in found)}) == 3
    assert found[0][1].data_ptr() != found[1][1].data_ptr()
    assert waiting_arena(CPU) is waiting
    recording(monkeypatch, False)
    assert run(workspaces)[0] is waiting


def test_a_recording_of_ours_leaves_its_arena(workspaces: Workspaces, monkeypatch: pytest.MonkeyPatch) -> None:
    recording(monkeypatch, True)
    with our_recording():
        arena, _ = run(workspaces)
        assert run(workspaces)[0] is arena
    assert waiting_arena(CPU) is arena
    assert run(workspaces)[0] is not arena
