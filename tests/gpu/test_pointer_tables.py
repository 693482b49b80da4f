"""Kernels whose addresses are in a table: on a CUDA device, over calls that move, on several streams, and in graphs. `make test-gpu`."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import opforge

pytestmark = pytest.mark.gpu

SIZES = (4096, 1024, 64, 0, 100_000, 16, 2048, 80, 48, 160, 4000, 33, 7, 1, 31, 2049, 5, 9, 3, 77, 100_001)
"""Two groups of more than eight: multiples of 16, and others."""


def step(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Writes every other tensor in place."""
    n = len(tensors) // 2
    torch._foreach_mul_(list(tensors[:n]), 2.0)
    return tuple(torch._foreach_lerp(list(tensors[:n]), list(tensors[n:]), 0.25))


def made(seed: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(n, device="cuda", generator=generator) for _ in range(2) for n in SIZES]


def compiled(**options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    opforge.reset_stats()
    return torch.compile(step, backend="opforge", options={"strict": "cudagraphs" not in options, **options})


def equal(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def compare(run: Callable[..., Any], inputs: list[Tensor]) -> Sequence[Tensor]:
    theirs = [t.clone() for t in inputs]
    got, want = run(*inputs), step(*theirs)
    torch.testing.assert_close([*got, *inputs], [*want, *theirs])
    return got  # type: ignore[no-any-return]


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_inputs_and_results_that_move(cudagraphs: bool) -> None:
    run = compiled(cudagraphs=True) if cudagraphs else compiled()
    inputs = [made(k) for k in range(3)]
    held: list[tuple[Sequence[Tensor], list[Tensor]]] = []
    for k in range(24):
        got = compare(run, inputs[k % 3 if k % 5 else 0])
        held.append((got, [t.clone() for t in got]))
        held = held[-(k % 4) :] if k % 4 else []
        for some, copies in held:
            equal(some, copies)
    assert re.search(r"_x10\(\d+, \[", opforge.last_artifacts().wrapper)
    assert bool(opforge.stats()["recordings"]) == cudagraphs


def test_an_odd_address() -> None:
    run = compiled()
    inputs = made(0)
    for k in (0, 4, len(SIZES) + 11):
        compare(run, inputs)
        moved = torch.cat([inputs[k][:1], inputs[k]])
        inputs[k] = moved[1:]
        compare(run, inputs)


def test_streams() -> None:
    """The second begins while the first still works."""
    run = compiled()
    inputs = [made(k) for k in range(2)]
    for given in inputs:
        compare(run, given)
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.no_grad():
        for k in range(10):
            torch.cuda.synchronize()
            theirs = [[t.clone() for t in given] for given in inputs]
            want = [step(*given) for given in theirs]
            torch.cuda.synchronize()
            got = []
            for n, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(1_000_000)
                    got.append(run(*inputs[(n + k) % 2]))
            torch.cuda.synchronize()
            for n in range(2):
                torch.testing.assert_close(got[n], want[(n + k) % 2])


def test_a_graph_of_the_users_own() -> None:
    """It lasts longer than the table that later calls have dropped, and than the compiled function."""
    run = compiled()
    inputs = made(0)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        for _ in range(3):
            run(*inputs)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            first = run(*inputs)
            second = run(*inputs)
        for k in range(12):
            run(*made(k))
        del run
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        junk = [torch.full((1 << 16,), -1, dtype=torch.int64, device="cuda") for _ in range(64)]
        for _ in range(4):
            for t in inputs:
                t.uniform_()
            theirs = [t.clone() for t in inputs]
            want = [step(*theirs), step(*theirs)]
            graph.replay()
            torch.testing.assert_close([*first, *second, *inputs], [*want[0], *want[1], *theirs])
    del junk
