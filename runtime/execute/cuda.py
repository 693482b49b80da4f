"""What wrappers of graphs on a GPU need while they run: memory of the current stream. (`launch` launches the kernels.)"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ..torch_compat import cuda_stream, empty_strided_cuda
from . import support
from .support import (
    as_complex,
    as_real,
    conform,
    keeping_workspace,
    laid_out,
    out_of_range,
    overload,
    own_complex,
    profiled,
    reinterpret,
    restride,
    unmet,
    unviewed,
)

empty_strided = empty_strided_cuda


class _Recording(threading.local):
    ours = False  # what is recorded in this thread is replayed on one stream, and knows its arena


_recording = _Recording()


@contextlib.contextmanager
def our_recording() -> Iterator[None]:
    """While this thread records a graph of ours."""
    before, _recording.ours = _recording.ours, True
    try:
        yield
    finally:
        _recording.ours = before


class Workspaces(support.Workspaces):
    """Of the current device and stream: work of one stream runs in order. A CUDA graph that the user records is replayed on any stream, also while
    others are that were recorded on the same one: each run in it has memory of its own, which is the graph's.
    """

    __slots__ = ()

    def take(self) -> tuple[support.Arena, Any]:
        if not torch.cuda.is_current_stream_capturing() or _recording.ours:
            return super().take()
        with torch.inference_mode(False):
            arena = support.Arena(self.size, self.place())
            return arena, self.make(arena.memory)

    def give(self, arena: support.Arena) -> None:
        if not torch.cuda.is_current_stream_capturing() or _recording.ours:
            super().give(arena)

    def place(self) -> support.Place:
        index = torch.cuda.current_device()
        return torch.device("cuda", index), cuda_stream(index)


__all__ = [
    "Workspaces",
    "as_complex",
    "as_real",
    "conform",
    "empty_strided",
    "keeping_workspace",
    "laid_out",
    "our_recording",
    "out_of_range",
    "overload",
    "own_complex",
    "profiled",
    "reinterpret",
    "restride",
    "unmet",
    "unviewed",
]
