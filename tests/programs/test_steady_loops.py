"""Loops of training in their steady state: after the second step nothing is captured and nothing compiled anew, and losses stay eager's (MISSION G3).

A loop that changes itself (other sizes, a parameter more) may capture and compile once more in the step in which it changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opforge
from opforge import compiled_autograd

STEPS = 7
CHANGE = 3  # the step in which some loops change


@dataclass
class Tools:
    """What a loop trains with: eager's, or those under test.

    compile   for models and losses whose forward is compiled.
    backward  of a loss, with what `Tensor.backward` takes.
    """

    compile: Callable[[Any], Any]
    backward: Callable[..., None]


Loop = Callable[[Tools], Iterator[Tensor]]
LOOPS: dict[str, Loop] = {}
CHANGED: list[str] = []
# Where sizes change in a compiled model, its forward is compiled anew, which makes a new backward. That is compiled for the sizes of this step, and
# for any sizes when these change.
COMPILED_LATER = [("batch_sizes_of_a_compiled_model", CHANGE + 1)]


def steady(loop: Loop) -> Loop:
    """A loop, which yields the loss of each step, and does the same in all of them."""
    LOOPS[loop.__name__] = loop
    return loop


def changes(loop: Loop) -> Loop:
    """A loop whose autograd graph, compiled forward or sizes change at the step CHANGE."""
    CHANGED.append(loop.__name__)
    return steady(loop)


def mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, 4)).double()


def batch(rows: int = 6, width: int = 8) -> Tensor:
    return torch.randn(rows, width, dtype=torch.float64)


def descend(tools: Tools, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Backward, a step of the optimizer, and no gradients for the next."""
    tools.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


@changes
def batch_sizes(tools: Tools) -> Iterator[Tensor]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in (6, 6, 6, 9, 12, 5, 7):
        loss = model(batch(rows)).square().mean()
        descend(tools, loss, optimizer)
        yield loss


@changes
def batch_sizes_of_a_compiled_model(tools: Tools) -> Iterator[Tensor]:
    model = mlp()
    forward = tools.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in (6, 6, 6, 9, 12, 5, 7):
        loss = forward(batch(rows)).square().mean()
        descend(tools, loss, optimizer)
        yield loss


@steady
def learning_rates(tools: Tools) -> Iterator[Tensor]:
    model = mlp()
    forward = tools.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        loss = forward(batch()).square().mean()
        descend(tools, loss, optimizer)
        yield loss


@steady
def scheduler(tools: Tools) -> Iterator[Tensor]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        loss = model(batch()).square().mean()
        tools.backward(loss)
        optimizer.step()
        cosine.step()
        optimizer.zero_grad()
        yield loss


@changes
def first_gradient_of_a_parameter(tools: Tools) -> Iterator[Tensor]:
    model, late = mlp(), nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = torch.optim.AdamW([*model.parameters(), late], lr=1e-2)
    for step in range(STEPS):
        y = model(batch())
        loss = (y * late if step >= CHANGE else y).square().mean()
        descend(tools, loss, optimizer)
        yield loss


@steady
def gradients_set_to_zero(tools: Tools) -> Iterator[Tensor]:
    model = mlp()
    forward = tools.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss = forward(batch()).square().mean()
        tools.backward(loss)
        optimizer.step()
        yield loss


@changes
def unfrozen(tools: Tools) -> Iterator[Tensor]:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        model[0].requires_grad_(step >= CHANGE)
        loss = model(batch()).square().mean()
        descend(tools, loss, optimizer)
        yield loss


@steady
def two_micro_batches(tools: Tools) -> Iterator[Tensor]:
    model = mlp()
    forward = tools.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for _ in range(2):
            loss = forward(batch()).square().mean() / 2
            tools.backward(loss)
            losses.append(loss.detach())
        optimizer.step()
        yield torch.stack(losses).sum()


@steady
def clipped(tools: Tools) -> Iterator[Tensor]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(STEPS):
        loss = model(batch()).square().mean()
        tools.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@steady
def foreach(tools: Tools) -> Iterator[Tensor]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    for _ in range(STEPS):
        loss = model(batch()).square().mean()
        tools.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@steady
def two_losses(tools: Tools) -> Iterator[Tensor]:
    """Each with a backward of its own through the part that they share."""
    trunk, heads = mlp(), nn.ModuleList(nn.Linear(4, 2) for _ in range(2)).double()
    optimizer = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.1)
    for _ in range(STEPS):
        y = trunk(batch())
        first, second = heads[0](y).square().mean(), heads[1](y).cos().mean()
        tools.backward(first, retain_graph=True)
        tools.backward(second)
        optimizer.step()
        optimizer.zero_grad()
        yield first + second


@steady
def backward_twice(tools: Tools) -> Iterator[Tensor]:
    model = mlp()
    forward = tools.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = forward(batch()).square().mean()
        tools.backward(loss, retain_graph=True)
        descend(tools, loss, optimizer)
        yield loss


@steady
def loss_times_a_number(tools: Tools) -> Iterator[Tensor]:
    """The number is another one in each step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = model(batch()).square().mean() * (1.5 + step) + model[0].weight.abs().sum() * (0.1 / (1 + step))
        descend(tools, loss, optimizer)
        yield loss


@steady
def scaled(tools: Tools) -> Iterator[Tensor]:
    """Scaled by a tensor, which is halved where a gradient is not finite."""
    model, scale = mlp(), torch.tensor(2.0**1023, dtype=torch.float64)
    forward = tools.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = forward(batch() * 8).square().mean()
        tools.backward(loss * scale)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, scale)
        if all(bool(g.isfinite().all()) for g in gradients):
            optimizer.step()
        else:
            scale = scale / 2**5
        optimizer.zero_grad()
        yield loss


@steady
def averaged_parameters(tools: Tools) -> Iterator[Tensor]:
    model = mlp()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x = batch()
        loss = F.mse_loss(model(x), average(x).detach() + 1)
        tools.backward(loss)
        optimizer.step()
        average.update_parameters(model)
        optimizer.zero_grad()
        yield loss


@steady
def tied_weights(tools: Tools) -> Iterator[Tensor]:
    embedding, head = nn.Embedding(10, 8).double(), nn.Linear(8, 10, bias=False).double()
    head.weight = embedding.weight
    forward = tools.compile(lambda tokens: F.cross_entropy(head(embedding(tokens).tanh()), tokens.roll(1)))
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss = forward(torch.randint(10, (12,)))
        descend(tools, loss, optimizer)
        yield loss


@steady
def dropout_and_norm(tools: Tools) -> Iterator[Tensor]:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = model(batch()).square().mean()
        descend(tools, loss, optimizer)
        yield loss


@steady
def evaluation_between_steps(tools: Tools) -> Iterator[Tensor]:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).double()
    forward = tools.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model.train()
        loss = forward(batch()).square().mean()
        descend(tools, loss, optimizer)
        model.eval()
        with torch.no_grad():
            yield loss + forward(batch()).mean()


@steady
def lstm(tools: Tools) -> Iterator[Tensor]:
    model = nn.LSTM(8, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torch.zeros(1, 2, 4, dtype=torch.float64), torch.zeros(1, 2, 4, dtype=torch.float64)
    for _ in range(STEPS):
        y, state = model(torch.randn(3, 2, 8, dtype=torch.float64), state)
        loss = y.square().mean()
        tools.backward(loss)
        state = state[0].detach(), state[1].detach()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@steady
def convolution(tools: Tools) -> Iterator[Tensor]:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)).double()
    forward = tools.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x, target = torch.randn(3, 2, 6, 6, dtype=torch.float64), torch.randint(3, (3,))
        loss = F.cross_entropy(forward(x), target)
        descend(tools, loss, optimizer)
        yield loss


@steady
def hooks_that_log(tools: Tools) -> Iterator[Tensor]:
    """Norms are collected in a list; each step adds their sum to what is compared."""
    model, seen = mlp(), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    for _ in range(STEPS):
        y = model(batch())
        y.register_hook(lambda g: seen.append(g.norm()))
        loss = y.square().mean()
        descend(tools, loss, optimizer)
        assert len(seen) == 5
        yield loss + torch.stack(seen).sum()
        seen.clear()


@steady
def hooks_that_replace_gradients(tools: Tools) -> Iterator[Tensor]:
    """As the hooks by which DDP averages gradients: what is added to a gradient goes through a library call, whose result is written over it. Its
    memory was freed before that: the gradient itself is not read again.
    """
    weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def replace(p: Tensor) -> None:
        p.grad.copy_(torch.linalg.matrix_exp(p.grad / 2))

    weight.register_post_accumulate_grad_hook(replace)
    for _ in range(STEPS):
        loss = (batch(4, 3) @ weight).square().mean()
        tools.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield loss


def run(loop: Loop, tools: Tools) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """The losses, and how many backwards were captured and graphs compiled up to the end of each step."""
    torch.manual_seed(0)
    counters = torch._dynamo.utils.counters
    losses, counts = [], []
    for loss in loop(tools):
        losses.append(loss.detach().clone())
        counts.append((counters["compiled_autograd"]["captures"], counters["stats"]["unique_graphs"]))
    return losses, counts


def captured_backward(loss: Tensor, **options: Any) -> None:
    with compiled_autograd.enable():
        loss.backward(**options)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled_autograd.reset()
    opforge.reset_stats()
    yield
    torch._dynamo.reset()
    compiled_autograd.reset()


@pytest.mark.parametrize("name", LOOPS)
def test_nothing_is_captured_after_the_second_step(name: str) -> None:
    loop = LOOPS[name]
    want, none = run(loop, Tools(lambda forward: forward, Tensor.backward))
    assert set(none) == {(0, 0)}
    losses, counts = run(loop, Tools(lambda forward: torch.compile(forward, backend="opforge"), captured_backward))
    torch.testing.assert_close(torch.stack(losses), torch.stack(want), rtol=1e-10, atol=1e-12)
    new = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise([(0, 0), *counts])]
    assert new[0][0] >= 1, "nothing was captured at all"
    for step in range(2, STEPS):
        captures, graphs = new[step]
        changed = step == CHANGE and name in CHANGED
        assert captures <= int(changed), f"captures at step {step}: {new}"
        if not changed and (name, step) not in COMPILED_LATER:
            assert graphs == 0, f"graphs compiled at step {step}: {new}"


def test_there_are_twenty_loops() -> None:
    assert len(LOOPS) >= 20


class Noted:
    def __init__(self) -> None:
        self.norms: list[float] = []

    @torch.compiler.disable
    def note(self, grad: Tensor) -> None:
        self.norms.append(grad.norm().item())


def test_calls_of_hooks_are_not_compiled() -> None:
    """At a hook that Dynamo does not follow, as FSDP2's, the graph ends. What calls the hook was compiled by itself, and anew for other sizes."""
    layers, noted = [nn.Linear(4 + k, 5 + k).double() for k in range(3)], Noted()

    def loss_of() -> Tensor:
        y = batch(3, 4)
        for layer in layers:
            y = layer(y).sin()
            y.register_hook(noted.note)
        return y.square().mean()

    torch.manual_seed(0)
    loss_of().backward()
    want, noted.norms = noted.norms, []
    torch.manual_seed(0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        captured_backward(loss_of())
    assert noted.norms == pytest.approx(want, rel=1e-10)
