"""Hooks on the gradients of a compiled graph's inputs run when eager runs them: from the last use in the forward to the first, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Note = tuple[str, str]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(i))
        return self.out(x + torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)) @ self.embed.weight.T


class Stacked(nn.Module):
    """All leaves are ready at once: the engine's queue decides."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(9)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.parts)).sum(0) * x


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def _images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def _noted(
    net: nn.Module, run: Callable[..., Any], *inputs: torch.Tensor
) -> tuple[list[Note], dict[str, torch.Tensor]]:
    """What hooks note of one training step, and the gradients."""
    order: list[Note] = []

    def note(kind: str, name: str) -> Callable[[Any], None]:
        return lambda _: order.append((kind, name))

    handles = []
    for name, p in net.named_parameters():
        handles.append(p.register_hook(note("tensor", name)))
        handles.append(p.register_post_accumulate_grad_hook(note("post", name)))
    net.zero_grad()
    run(*inputs).sum().backward()
    for handle in handles:
        handle.remove()
    return order, {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (_layers, torch.randn(2, 4)),
        (_images, torch.randn(2, 3, 6, 6)),
        (Attention, torch.randint(0, 10, (2, 5))),
        (Stacked, torch.randn(3)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), torch.randn(2, 3, 8)),
    ],
)
def test_order_is_eagers(make: Callable[[], nn.Module], x: torch.Tensor) -> None:
    net = make()
    compiled = torch.compile(net, backend="opforge", options={"strict": True})
    expected, gradients = _noted(net, net, x)
    found, ours = _noted(net, compiled, x)
    assert found == expected
    torch.testing.assert_close(ours, gradients)
    compiled(x).sum().backward()  # without hooks, by the same graph


def test_a_hook_may_change_what_arrives() -> None:
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    run = torch.compile(lambda a, b: (a * b).exp() * a, backend="opforge", options={"strict": True})
    a.register_hook(lambda g: g * 2)
    run(a, b).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    torch.testing.assert_close(a.grad, torch.full((3,), 4 * torch.e))
    torch.testing.assert_close(b.grad, torch.full((3,), torch.e))


def test_data_that_is_replaced_before_the_backward_is_read() -> None:
    def step(run: Callable[..., torch.Tensor]) -> list[Any]:
        a, b = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
        a.register_hook(lambda g: None)
        y = run(a, b)
        a.data = torch.full((3,), 5.0)
        y.sum().backward()
        return [a.grad, b.grad]

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b

    torch.testing.assert_close(step(torch.compile(program, backend="opforge")), step(program))


@pytest.mark.parametrize("which", [0, 1])
def test_hooks_of_what_eager_does_not_reach_do_not_run(which: int) -> None:
    """A hook of a parameter that only the other result depends on was called with None."""

    def program(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * a * c, x * b * c

    def step(run: Callable[..., tuple[torch.Tensor, ...]]) -> tuple[list[str], list[Any]]:
        leaves = dict(zip("abc", (torch.full((3,), float(n), requires_grad=True) for n in range(3)), strict=True))
        order: list[str] = []
        for name, t in leaves.items():
            t.register_hook(lambda g, name=name: order.append(name) or g * 2)  # type: ignore[func-returns-value]
            t.register_post_accumulate_grad_hook(lambda p, name=name: order.append(f"{name} {p.grad.sum()}"))
        run(torch.arange(3.0), *leaves.values())[which].sum().backward()
        return order, [t.grad for t in leaves.values()]

    found, expected = step(torch.compile(program, backend="opforge")), step(program)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1])
