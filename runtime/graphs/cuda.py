"""Recording on a CUDA device: `torch.cuda.CUDAGraph`, captured on a stream of its own for each stream that replays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..execute.support import waiting_arena
from ..torch_compat import drop_library_workspaces

_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


class CudaRecorder:
    """`Recorder` for the device `index`. Every recording has a memory pool of its own, but for the arena of intermediate values: all
    recordings that are replayed on one stream share it.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def place(self) -> Hashable:
        if torch.cuda.is_current_stream_capturing():
            return None
        return torch.cuda.current_stream(self.index).cuda_stream

    def record(
        self, call: Callable[..., Sequence[Any]], inputs: Sequence[Any]
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        current = torch.cuda.current_stream(self.index)
        stream = _streams.setdefault((self.index, current.cuda_stream), torch.cuda.Stream(self.index))
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        # The memory that cuBLAS works in must live as long as the graph, which has its address: it is in the graph's own pool if it is
        # made while that records, and another recording must not find it. Torch may free what is outside of the pool at any time.
        drop_library_workspaces()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                results = call(*inputs)
            except Exception:
                _end(graph)
                raise
            else:
                graph.capture_end()
            finally:
                drop_library_workspaces()
            arena = waiting_arena((torch.device("cuda", self.index), stream.cuda_stream))
        current.wait_stream(stream)

        def replay(graph: torch.cuda.CUDAGraph = graph, keep: Any = arena) -> None:
            graph.replay()

        return replay, results


def _end(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that failed: the stream works again. That the capture is not valid is known."""
    try:
        graph.capture_end()
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
