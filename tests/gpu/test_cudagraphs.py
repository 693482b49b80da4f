"""Recorded programs on a CUDA device: the same numbers as without, over many steps. `make test-gpu`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opforge

pytestmark = pytest.mark.gpu


def recorded(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    opforge.reset_stats()
    return torch.compile(f, backend="opforge", options={"cudagraphs": True, **options})


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64)).cuda()


def test_inference_replays() -> None:
    net = model()
    run = recorded(net, strict=True)
    with torch.no_grad():
        for _ in range(8):
            x = torch.randn(32, 64, device="cuda")
            torch.testing.assert_close(run(x), net(x), rtol=1e-4, atol=1e-4)
    stats = opforge.stats()
    assert stats["recordings"] >= 1
    assert stats["unrecorded"] == {}


@pytest.mark.parametrize("late_zero", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
def test_training_is_as_without(late_zero: bool, rounds: int) -> None:
    def train(wrap: Callable[[nn.Module], Callable[..., Any]]) -> list[float]:
        net = model()
        run = wrap(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        generator = torch.Generator("cuda").manual_seed(1)
        losses = []
        for _ in range(12):
            if not late_zero:
                optimizer.zero_grad()
            for k in range(rounds):
                x = torch.randn(32, 64, device="cuda", generator=generator)
                loss = F.mse_loss(run(x), x)
                if late_zero and k == 0:
                    optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    want = train(lambda net: net)
    got = train(lambda net: recorded(net))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-4, atol=1e-5)
    assert opforge.stats()["unrecorded"] == {}


def test_results_that_are_kept_stay_as_they_were() -> None:
    run = recorded(lambda x: (x.sin(), x * 2))
    held = []
    for n in range(10):
        x = torch.full((1000,), float(n), device="cuda")
        held.append((x, *run(x)))
    for x, sine, double in held:
        torch.testing.assert_close(sine, x.sin())
        assert torch.equal(double, x * 2)


def test_random_numbers_differ_from_replay_to_replay() -> None:
    run = recorded(lambda x: F.dropout(x, 0.5))
    x = torch.ones(4096, device="cuda")
    drawn = [run(x).clone() for _ in range(6)]
    assert opforge.stats()["recordings"] >= 1
    for k, a in enumerate(drawn):
        assert 0.4 < float((a == 0).float().mean()) < 0.6
        assert not any(torch.equal(a, b) for b in drawn[:k])


def test_running_statistics() -> None:
    net, twin = nn.BatchNorm1d(16).cuda(), nn.BatchNorm1d(16).cuda()
    run = recorded(net)
    for _ in range(6):
        x = torch.randn(64, 16, device="cuda")
        torch.testing.assert_close(run(x), twin(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(net.running_mean, twin.running_mean)
        torch.testing.assert_close(net.running_var, twin.running_var)
        assert net.num_batches_tracked == twin.num_batches_tracked


def test_what_synchronizes_runs_as_it_is() -> None:
    run = recorded(lambda x: x.nonzero() * 2)
    x = torch.tensor([0.0, 1.0, 2.0], device="cuda")
    for _ in range(4):
        assert torch.equal(run(x), x.nonzero() * 2)
    torch.cuda.synchronize()


def test_another_stream() -> None:
    run = recorded(lambda x: (x @ x).relu())
    x = torch.randn(64, 64, device="cuda")
    want = (x @ x).relu()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(4):
                out = run(x)
            stream.synchronize()
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


def test_inside_of_a_recording_of_the_user() -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin() * 2

    run = recorded(f)
    x = torch.randn(100, device="cuda")
    for _ in range(3):
        run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x)
    x.fill_(1)
    graph.replay()
    torch.testing.assert_close(out, f(x))


def test_memory_returns() -> None:
    def f(x: Tensor) -> Tensor:
        return x * 2 + 1

    x = torch.randn(1 << 22, device="cuda")
    before = torch.cuda.memory_allocated()
    run = recorded(f)
    for _ in range(4):
        out = run(x)
    del run, out
    torch._dynamo.reset()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_no_memory_during_recording_leaves_the_process_usable() -> None:
    free, _ = torch.cuda.mem_get_info()
    run = recorded(lambda x: (x.view(1, -1).expand(3, -1).clone() * 2,))
    x = torch.empty(free // 5, dtype=torch.uint8, device="cuda").zero_()
    for _ in range(3):
        try:
            out = run(x)
            del out
        except torch.cuda.OutOfMemoryError:
            pass
    del x
    torch.cuda.empty_cache()
    y = torch.ones(10, device="cuda")
    assert (y * 2).sum().item() == 20


def test_the_memory_of_products_lives_as_long_as_a_recording() -> None:
    """Products that are cut along their sum work in memory that torch keeps for the library, and may free."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 1 << 16, device="cuda").bfloat16(), torch.randn(1 << 16, 64, device="cuda").bfloat16()
    with torch.no_grad():
        first = recorded(lambda x, w: (x @ w).relu())
        for _ in range(4):
            first(x, w)
        second = torch.compile(lambda x, w: (x @ w).sin(), backend="opforge", options={"cudagraphs": True})
        for _ in range(4):
            wanted = second(x, w).clone()
        del first
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        for _ in range(4):
            junk = torch.full((1 << 24,), float("nan"), device="cuda")
            torch.testing.assert_close(second(x, w), wanted)
            del junk
