"""Recorded programs on a CUDA device: the same numbers as without, over many steps. `make test-gpu`."""

from __future__ import annotations

import gc
import threading
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


@pytest.mark.parametrize("held", [1, 100])
def test_losses_that_are_held(held: int) -> None:
    """Until the next one, or for good: they are copies, and no other memory is recorded for them."""

    def train(wrap: Callable[[Any], Any]) -> list[float]:
        net = model()
        run = wrap(lambda x: F.mse_loss(net(x), x))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        generator = torch.Generator("cuda").manual_seed(1)
        x = torch.empty(32, 64, device="cuda")
        kept: list[Tensor] = []
        values = []
        for _ in range(20):
            x.normal_(generator=generator)
            kept.append(run(x))
            values.append(kept[-1].item())
            del kept[:-held]
            optimizer.zero_grad()
            kept[-1].backward()
            optimizer.step()
        assert [t.item() for t in kept] == values[-held:]
        return values

    want = train(lambda f: f)
    got = train(lambda f: recorded(f, strict=True))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-3, atol=1e-4)
    stats = opforge.stats()
    assert stats["unrecorded"] == {}
    assert 2 <= stats["recordings"] <= 8


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


def test_results_whose_storage_the_user_resizes() -> None:
    """Replays write where they did, and so the results are there."""
    run = recorded(lambda x: (x * 2, x.sin() @ x.cos(), x.expand(64, *x.shape) + 1))
    x = torch.randn(64, 64, device="cuda")
    want = x * 2, x.sin() @ x.cos(), x.expand(64, *x.shape) + 1
    changes: list[Callable[[Tensor], Any]] = [
        lambda t: t.resize_(5),
        lambda t: t.resize_(1 << 20),
        lambda t: t.untyped_storage().resize_(0),
        lambda t: None,
    ]
    kept = []
    for k in range(16):
        found = run(x)
        for mine, eager in zip(found, want, strict=True):
            torch.testing.assert_close(mine, eager)
        for t in found:
            changes[k % 4](t)
        kept.append(found)
        del found, kept[:-2]
    torch.cuda.synchronize()


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


def deep(width: int = 1024) -> nn.Module:
    """Whose forward keeps much for its backward."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU()) for _ in range(8)]).cuda()


def held_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def step(net: nn.Module, run: Callable[..., Any], x: Tensor) -> list[Tensor]:
    """The loss and some gradients."""
    net.zero_grad()
    loss = run(x).square().mean()
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in list(net.parameters())[:2])]


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-5)


def test_a_backward_uses_the_memory_of_its_forward() -> None:
    reserved = {}
    for share in (True, False):
        net, x = deep(), torch.randn(4096, 1024, device="cuda")
        run = recorded(net, cudagraphs_share_memory=share)
        before = held_bytes()
        for _ in range(8):
            got = step(net, run, x)
        close(got, step(net, net, x))
        net.zero_grad()
        del got
        reserved[share] = held_bytes() - before
        assert opforge.stats()["unrecorded"] == {}
        assert opforge.stats()["recordings"] >= 2
        del net, run
        torch._dynamo.reset()
    assert reserved[True] < 0.9 * reserved[False], reserved


def test_results_of_recordings_that_share_memory_stay_as_they_were() -> None:
    net, x = deep(256), torch.randn(512, 256, device="cuda")
    run = recorded(net)
    kept: list[tuple[Tensor, Tensor]] = []
    for n in range(16):
        x.normal_()
        out = run(x)
        want = net(x)
        torch.testing.assert_close(out, want, rtol=2e-3, atol=1e-5)
        if n % 3 == 1:
            kept.append((out, out.detach().clone()))
        net.zero_grad()
        out.square().sum().backward(retain_graph=n % 4 == 2)
        if n % 4 == 2:
            out.square().sum().backward()
        got = [p.grad for p in net.parameters()]
        if n % 5 == 3:
            kept.extend((g, g.clone()) for g in got)
        net.zero_grad()
        want.square().sum().backward()
        scale = 2 if n % 4 == 2 else 1
        for g, p in zip(got, net.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad * scale, rtol=1e-2, atol=1e-3)
        for t, value in kept:
            assert torch.equal(t, value)
        if n % 7 == 6:
            del kept[: len(kept) // 2]
        del out, want, got


def test_programs_with_many_branches() -> None:
    """Graph breaks and branches: many regions, called in orders that change."""
    net, x = deep(128), torch.randn(64, 128, device="cuda")

    def program(x: Tensor, way: int) -> Tensor:
        y = net[0](x)
        torch._dynamo.graph_break()
        y = net[1](y).sin() if way % 2 else net[2](y).cos()
        torch._dynamo.graph_break()
        return (net[3](y) + x).relu() if way % 3 else net[4](y) * 2

    run = recorded(program)
    kept: list[tuple[Tensor, Tensor]] = []
    for n in range(40):
        x.normal_()
        way = (n * n + n // 3) % 6
        net.zero_grad()
        out = run(x, way)
        want = program(x, way)
        torch.testing.assert_close(out, want, rtol=2e-3, atol=1e-4)
        if n % 4:
            out.sum().backward()
            got = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
            net.zero_grad()
            want.sum().backward()
            for g, p in zip(got, net.parameters(), strict=True):
                assert (g is None) == (p.grad is None)
                if g is not None:
                    torch.testing.assert_close(g, p.grad, rtol=1e-2, atol=1e-3)
        if n % 5 == 0:
            kept.append((out, out.detach().clone()))
        for t, value in kept[-3:]:
            assert torch.equal(t, value)
        del out, want
    assert opforge.stats()["recordings"] >= 4


def test_two_models_in_turns_and_two_shapes() -> None:
    nets = [deep(512), deep(256)]
    runs = [recorded(nets[0])]
    runs.append(torch.compile(nets[1], backend="opforge", dynamic=False, options={"cudagraphs": True}))
    xs = [[torch.randn(rows, width, device="cuda") for rows in (1024, 300)] for width in (512, 256)]
    for n in range(14):
        for net, run, inputs in zip(nets, runs, xs, strict=True):
            x = inputs[n % 2 if n < 10 else 0].normal_()
            close(step(net, run, x), step(net, net, x))
    assert opforge.stats()["unrecorded"] == {}


def test_results_outlive_their_model() -> None:
    """Also those at addresses that a later recording was given: the pool stays as long as they do."""
    before = held_bytes()
    net, x = deep(256), torch.randn(512, 256, device="cuda")
    run = recorded(net)
    for _ in range(5):
        step(net, run, x)
    out = run(x)  # with all that its backward needs
    want = [out.detach().clone()]
    net.zero_grad()
    del run, net
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    other, y = deep(256), torch.randn(512, 256, device="cuda")
    run = torch.compile(other, backend="opforge", options={"cudagraphs": True})
    for _ in range(4):
        close(step(other, run, y), step(other, other, y))
    assert torch.equal(out, want[0])
    out.square().sum().backward()
    del junk, out, want, other, run, x, y
    torch._dynamo.reset()
    assert held_bytes() <= before + (48 << 20)


@pytest.mark.parametrize("warm", [1, 4])
def test_no_memory_while_a_step_is_recorded(warm: int) -> None:
    """What is there is enough for calls without a recording, and those are right, recorded or not. `warm`: steps before memory ends."""
    net, x = deep(512), torch.randn(4096, 512, device="cuda")
    run = recorded(net)
    for _ in range(warm):
        step(net, run, x)
    inputs = x if warm == 1 else torch.randn(5000, 512, device="cuda")
    want = step(net, net, inputs)
    run(inputs).sum().backward()  # compiled for these sizes
    net.zero_grad()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + (8 << 20)) / total))
    try:
        for _ in range(4):
            close(step(net, run, inputs), want)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    fresh = recorded(deep(512))
    for _ in range(4):
        fresh(x)
    assert opforge.stats()["unrecorded"] == {}


def test_a_capture_that_is_not_valid_harms_no_other_recording() -> None:
    """One that waits for the device ends its pool; others in it go on, and new ones are made."""
    net, x = deep(256), torch.randn(256, 256, device="cuda")
    run = recorded(net)
    for _ in range(4):
        step(net, run, x)
    bad = torch.compile(lambda x: x.nonzero() * 2, backend="opforge", options={"cudagraphs": True})
    for _ in range(3):
        assert torch.equal(bad(x), x.nonzero() * 2)
    third = deep(256)
    again = torch.compile(third, backend="opforge", options={"cudagraphs": True})
    for _ in range(4):
        close(step(net, run, x), step(net, net, x))
        close(step(third, again, x), step(third, third, x))


def test_threads_on_streams_of_their_own() -> None:
    net = deep(256).eval()
    run = recorded(net)
    wrong = []

    def work(n: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            x = torch.full((64, 256), n / 10, device="cuda")
            want = net(x)
            for _ in range(20):
                if not torch.allclose(run(x), want, rtol=2e-3, atol=1e-4):
                    wrong.append(n)

    with torch.no_grad():
        run(torch.zeros(64, 256, device="cuda"))
    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_complex_results_may_be_written(cudagraphs: bool) -> None:
    """They are views of nothing, with a gradient and without, and lazy conjugates where eager's are."""

    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y.exp(), y.conj(), torch.fft.ifft(x.real)

    run = recorded(program, cudagraphs=cudagraphs)
    for training in (False, True):
        for seed in range(5):
            torch.manual_seed(seed)
            ours = torch.randn(16, 32, dtype=torch.complex64, device="cuda", requires_grad=training)
            theirs = ours.detach().clone().requires_grad_(training)
            found, expected = run(ours), program(theirs)
            for a, b in zip(found, expected, strict=True):
                assert (a.is_conj(), a.stride()) == (b.is_conj(), b.stride())
                torch.testing.assert_close(a, b)
            found[1].mul_(3j), expected[1].mul_(3j)
            torch.testing.assert_close(found[1], expected[1])
            if training:
                for results in found, expected:
                    (results[1] - results[2]).abs().sum().backward()
                torch.testing.assert_close(ours.grad, theirs.grad)
    assert opforge.stats()["fallbacks"] == {}
