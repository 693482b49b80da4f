"""Programs over rows whose values the same kernel reads at other points of the row, or keeps. Of one input [rows, width]."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Result = Tensor | tuple[Tensor, ...]


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:])


def turned(x: Tensor) -> Tensor:
    return norm(x).flip(1)


def sums_in_memory(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Running sums of rows of which registers do not hold five beside each other: they go through memory to what reads them."""
    s = (x * a + b).cumsum(1)
    return s / s.abs().amax(1, keepdim=True) + c * d


def running(x: Tensor) -> Tensor:
    """A running sum can be computed at no other points; of whole numbers every order gives the same, in every precision."""
    whole = torch.round(x * 4)
    y = (whole.amax(1, keepdim=True) - whole).cumsum(1)
    return torch.softmax((y - y.amax(1, keepdim=True)) / 1024, 1).flip(1)


def and_a_gradient(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.tanh(torch.exp(x) * torch.tanh(x))
    z = y - y.mean(1, keepdim=True)
    return z.flip(1), torch.tanh(z.roll(3, 1)) * (1 - y * y)


def padded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Where the padding is, nothing may be read: it would lie before the row."""
    y = torch.tanh(torch.exp(x) * torch.tanh(x))
    y = y / y.sum(1, keepdim=True)
    return F.pad(y, (3, 2)).square().sum(1), y.amax(1)


def kept(x: Tensor) -> Tensor:
    """What costs too much to be computed again stays in registers: it is read by two reductions and the result."""
    y = torch.tanh(torch.exp(torch.softmax(x, 1) * x))
    return torch.softmax(torch.exp(torch.tanh(y - y.mean(1, keepdim=True))), 1)


def picked_beside(x: Tensor, places: Tensor) -> Tensor:
    """Half of a row, and places of its first 20 that data brings: each is read under its own condition."""
    return torch.cat([x[:, 20:], x[:, places][:, :20]], 1).mean(1)


STEPS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: x.sin().exp(),
    lambda x, y: torch.tanh(x + y),
    lambda x, y: x.mean(1, keepdim=True) + y,
    lambda x, y: x / (x.abs().amax(1, keepdim=True) + 1),
    lambda x, y: x.flip(1),
    lambda x, y: torch.roll(x, 3, 1) * x.flip(1) + torch.roll(x, 1, 1),
    lambda x, y: torch.softmax(x, 1),
    lambda x, y: norm(x) + y,
    lambda x, y: torch.tanh(x).cumsum(1),
)


def at_random(seed: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Five to thirteen steps, each of one of the last four values and of any."""
    r = random.Random(seed)
    steps = [
        (r.choice(STEPS), r.randrange(max(0, k - 3), k + 1), r.randrange(k + 1)) for k in range(r.randrange(5, 14))
    ]

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for step, a, b in steps:
            values.append(step(values[a], values[b]))
        return tuple(values[-2:])

    return fn


def cells(xs: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Tensor:
    """A plain recurrent network over [B, T, F], whose states are all judged."""
    h, states = xs.new_zeros(xs.shape[0], u.shape[0]), []
    for t in range(xs.shape[1]):
        h = torch.tanh(F.linear(xs[:, t], w, b) + F.linear(h, u))
        states.append(h)
    return torch.stack(states, 1).square().mean()
