"""A compiled program on several streams of a GPU at once, beside replays of CUDA graphs of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def same_on_streams(
    run: Callable[[Tensor], Tensor], inputs: Sequence[Tensor], meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Each call and each replay gives what a call alone does, to the bit. `meanwhile` is called in each round, on a stream of its own."""
    want = [run(x).clone() for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    graphs = []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(x)
        graphs.append((graph, out))
    busy = torch.cuda.Stream()
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[] for _ in inputs]
    for _ in range(100):
        with torch.cuda.stream(busy):
            meanwhile()
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[k].append(run(inputs[k]))
                graphs[k][0].replay()
    torch.cuda.synchronize()
    for k, some in enumerate(found):
        assert all(torch.equal(one, want[k]) for one in some)
        assert torch.equal(graphs[k][1], want[k])


__all__ = ["same_on_streams"]
