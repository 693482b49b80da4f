"""Recording on a CUDA device: `torch.cuda.CUDAGraph`, captured on a stream of its own for each stream that replays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..execute.cuda import our_recording
from ..execute.support import swap_arena, waiting_arena
from ..torch_compat import abandon_capture, drop_library_workspaces
from .recording import Boxed

_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


class CudaMemory:
    """A pool of torch's allocator for memory that is used while something is captured. Torch keeps such a pool while a graph has it: `keep` is
    one that is never replayed.
    """

    def __init__(self) -> None:
        self.id = torch.cuda.graph_pool_handle()
        self.keep: torch.cuda.CUDAGraph | None = None

    def hold(self, device: torch.device) -> None:
        """Keep the memory as long as this object, whatever becomes of the recordings in it. On the stream that captures."""
        if self.keep is None:
            a, b = torch.empty(2, 1, device=device)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self.id, capture_error_mode="thread_local")
            a.copy_(b)  # torch warns of an empty graph
            graph.capture_end()
            self.keep = graph


class CudaRecorder:
    """`Recorder` for the device `index`.

    A recording whose memory is shared keeps nothing of it but its results: the arena of intermediate values goes back to the pool. Others are
    each alone in a pool, but for that arena: those that are replayed on one stream share it.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def place(self) -> Hashable:
        if torch.cuda.is_current_stream_capturing():
            return None
        return self.index, torch.cuda.current_stream(self.index).cuda_stream

    def shares(self) -> bool:
        return torch.cuda.get_allocator_backend() == "native"

    def memory(self) -> CudaMemory:
        return CudaMemory()

    def record(
        self, call: Boxed, inputs: list[Any], memory: CudaMemory, shared: bool
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        current = torch.cuda.current_stream(self.index)
        stream = _streams.setdefault((self.index, current.cuda_stream), torch.cuda.Stream(self.index))
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        # The memory that cuBLAS works in must live as long as the graph, which has its address: it is in the graph's own pool if it is
        # made while that records, and another recording must not find it. Torch may free what is outside of the pool at any time.
        drop_library_workspaces()
        place = (torch.device("cuda", self.index), stream.cuda_stream)
        with torch.cuda.stream(stream), our_recording():
            if shared:
                memory.hold(place[0])
            aside = swap_arena(place, None) if shared else None
            graph.capture_begin(pool=memory.id, capture_error_mode="thread_local")
            try:
                try:
                    results = call(inputs)
                except Exception:
                    _end(graph)
                    raise
                graph.capture_end()
            except Exception:
                abandon_capture(self.index, memory.id)
                raise
            finally:
                drop_library_workspaces()
                arena = swap_arena(place, aside) if shared else waiting_arena(place)
        current.wait_stream(stream)
        if shared:
            arena = None

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
