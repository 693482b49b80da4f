"""Sums whose parts the last program adds up: the same to the bit in every launch, on streams side by side, and in CUDA graphs. `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opforge
from opforge.generated import tuning
from opforge.runtime.machine import tuning_of
from opforge.runtime.targets.cuda import capability
from tests.support.streams import same_on_streams

pytestmark = pytest.mark.gpu


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Callable[..., Tensor]]]:
    mine = capability(torch.cuda.current_device())
    known = min(tuning.TUNING, key=lambda k: (abs(k - mine), k))
    monkeypatch.setitem(tuning.TUNING, known, replace(tuning.TUNING[known], last=tuning.Last(256, 4096)))
    tuning_of.cache_clear()

    def compiling(f: Callable[..., Tensor], **options: object) -> Callable[..., Tensor]:
        torch._dynamo.reset()
        opforge.reset_stats()
        return torch.compile(f, backend="opforge", options={"strict": True, "cache_dir": str(tmp_path), **options})

    yield compiling
    tuning_of.cache_clear()


PROGRAMS: dict[str, tuple[Callable[..., Tensor], int, tuple[int, ...]]] = {
    "sum": (lambda x: x.sum(), 1, (1000, 1001)),
    "squared error": (lambda x, y: F.mse_loss(x, y), 2, (1024, 2048)),
    "few rows": (lambda x: x.sum(-1), 1, (8, 1 << 18)),
    "maxima": (lambda x: x.amax(-1), 1, (3, 1 << 18)),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("cudagraphs", [False, True])
def test_every_launch_gives_the_same(
    name: str, cudagraphs: bool, compiled: Callable[..., Callable[..., Tensor]]
) -> None:
    f, count, shape = PROGRAMS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device="cuda") for _ in range(count)]
    run = compiled(f, cudagraphs=cudagraphs)
    want = run(*inputs).clone()
    assert opforge.stats()["kernels"] == (2 if cudagraphs else 1)  # another launch of a replay costs less than to count
    exact, eager = f(*(t.double() for t in inputs)), f(*inputs)
    assert float((want - exact).abs().max()) <= max(
        2 * float((eager - exact).abs().max()), 1e-6 * float(exact.abs().max())
    )
    for _ in range(500):
        assert torch.equal(run(*inputs), want)


def test_streams_side_by_side(compiled: Callable[..., Callable[..., Tensor]]) -> None:
    run = compiled(lambda x: x.sum())
    same_on_streams(run, [torch.randn(1 << 20, device="cuda") for _ in range(4)])


def test_graphs_of_one_stream_share_no_memory(compiled: Callable[..., Callable[..., Tensor]]) -> None:
    """Two that were recorded on one stream, replayed side by side on others."""
    run = compiled(lambda x, y: (x.sum() * y).sum())
    inputs = [torch.full((1 << 20,), float(k + 1), device="cuda") for k in range(2)]
    y = torch.ones(1 << 20, device="cuda")
    want = [run(x, y).clone() for x in inputs]
    graphs = []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(x, y)
        graphs.append((graph, out))
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(50):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert [float(out) for _, out in graphs] == [float(w) for w in want]
