"""Captured backwards on a GPU: gradients, losses and the order of hooks as in eager (MISSION G1-G3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import opforge
from opforge import compiled_autograd

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    compiled_autograd.reset()
    yield
    torch._dynamo.reset()
    compiled_autograd.reset()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x))
        torch._dynamo.graph_break()
        return self.second(torch.nn.functional.gelu(y) * 0.5).square().mean()


def losses(model: Any, capture: Any, sizes: list[int]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for k, size in enumerate(sizes):
        torch.manual_seed(k)
        loss = model(torch.randn(size, 64, device="cuda"))
        with capture():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.item())
    return found


def test_steps_of_training() -> None:
    torch.manual_seed(0)
    model = Model().cuda()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    want = losses(model, nullcontext, [32, 32, 48, 32])
    model.load_state_dict(start)
    opforge.reset_stats()
    compile = torch.compile(backend="opforge", fullgraph=True)
    found = losses(torch.compile(model, backend="opforge"), lambda: compiled_autograd.enable(compile), [32, 32, 48, 32])
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert not opforge.stats()["fallbacks"]


@pytest.mark.parametrize("compile", [lambda graph: graph, torch.compile(backend="opforge")], ids=["graph", "opforge"])
def test_hooks_in_order(compile: Any) -> None:
    def seen(capture: Any) -> tuple[list[str], torch.Tensor | None]:
        torch.manual_seed(0)
        a, b = (torch.randn(4, 4, device="cuda", requires_grad=True) for _ in range(2))
        events: list[str] = []
        u = a.exp()
        v, w = u * b, u.cos()
        for name, t in (("u", u), ("v", v), ("w", w), ("a", a), ("b", b)):
            t.register_hook(lambda g, name=name: events.append(name))
        for name, t in (("a", a), ("b", b)):
            t.register_post_accumulate_grad_hook(lambda t, name=name: events.append(f"{name} has one"))
        loss = (w * v + u).sum()
        with capture():
            loss.backward()
        return events, a.grad

    events, want = seen(nullcontext)
    found_events, found = seen(lambda: compiled_autograd.enable(compile))
    assert found_events == events
    torch.testing.assert_close(found, want)


def test_a_number_on_the_processor() -> None:
    x = torch.randn(8, device="cuda", requires_grad=True)
    loss = (x * torch.tensor(3.0) / torch.tensor(2.0)).sin().sum()
    with compiled_autograd.enable(torch.compile(backend="opforge")):
        loss.backward()
    torch.testing.assert_close(x.grad, 1.5 * (x.detach() * 1.5).cos())


def test_memory_is_not_more_than_eagers() -> None:
    """Gradients die as early as in eager."""

    def peak(capture: Any) -> int:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(
            *(m for _ in range(6) for m in (torch.nn.Linear(512, 512), torch.nn.GELU()))
        ).cuda()
        x = torch.randn(4096, 512, device="cuda")
        for _ in range(2):
            layers.zero_grad(set_to_none=True)
            loss = layers(x).square().mean()
            torch.cuda.reset_peak_memory_stats()
            with capture():
                loss.backward()
        return torch.cuda.max_memory_allocated()

    eager = peak(nullcontext)
    compile = torch.compile(backend="opforge")
    captured = peak(lambda: compiled_autograd.enable(compile))
    print(f"peak {captured / eager:.3f} of eager's")
    assert captured <= 1.02 * eager
