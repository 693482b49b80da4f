"""Effects (MISSION A10): kept, once, in the program's order, in the half that the program ran them in, with what was there to read then."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._library.effects import EffectType
from torch.library import custom_op

import opforge
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.dispatch.wrapper.source import bind
from opforge.runtime.torch_compat import with_effects

NOTES: list[Any] = []


@custom_op("opforge_effects::say", mutates_args=())
def say(x: torch.Tensor, tag: int) -> None:
    """An effect without a result."""
    NOTES.append((tag, x.flatten()[0].item()))


@say.register_fake
def _(x: torch.Tensor, tag: int) -> None:
    return None


@custom_op("opforge_effects::note", mutates_args=())
def note(x: torch.Tensor, tag: int) -> torch.Tensor:
    """An effect with a result, registered as one."""
    NOTES.append((tag, x.flatten()[0].item()))
    return x * 2


@note.register_fake
def _(x: torch.Tensor, tag: int) -> torch.Tensor:
    return torch.empty_like(x)


note.register_autograd(lambda ctx, g: (g * 2, None), setup_context=lambda ctx, inputs, output: None)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    handle = torch.library._register_effectful_op("opforge_effects::note", EFFECT)
    torch._dynamo.reset()
    opforge.reset_stats()
    yield
    del handle
    assert not opforge.stats()["fallbacks"]


EFFECT = EffectType.ORDERED
SAY, NOTE = torch.ops.opforge_effects.say, torch.ops.opforge_effects.note


class Speaking(torch.autograd.Function):
    """Effects in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        SAY(x, 10)
        return x * 3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        SAY(g, 11)
        SAY(g * 2, 12)
        return g * 3


def around_writes(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    SAY(y, 1)
    y.add_(1)
    SAY(y, 2)
    y[0] = 7
    SAY(y, 3)
    return y.sin().sum()


def repeated(x: torch.Tensor) -> torch.Tensor:
    SAY(x, 1)
    SAY(x, 1)
    NOTE(x, 2)
    NOTE(x, 2)
    return (NOTE(x, 2) * x).sum()


def mixed(x: torch.Tensor) -> torch.Tensor:
    SAY(x, 1)
    y = NOTE(x, 2).exp()
    SAY(y, 3)
    z = NOTE(y, 4)
    SAY(x, 5)
    return (z * y).sum()


def written_input(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    SAY(x, 1)
    x.mul_(5)
    SAY(x, 2)
    return x.sum()


def both_halves(x: torch.Tensor) -> torch.Tensor:
    SAY(x, 1)
    y = Speaking.apply(x)
    SAY(y, 2)
    return y.cos().sum()


def nothing_else(x: torch.Tensor) -> torch.Tensor:
    SAY(x + 1, 1)
    return x.sum()


PROGRAMS = [around_writes, repeated, mixed, written_input, both_halves, nothing_else]


def notes(run: Callable[..., Any], grad: bool) -> list[Any]:
    """What `run` noted, with marks between calls and halves."""
    NOTES.clear()
    for start in (1.0, 2.0):
        x = torch.arange(start, start + 4, requires_grad=grad)
        loss = run(x)
        NOTES.append("between")
        if grad:
            loss.backward()
            NOTES.append(x.grad.tolist())
    return list(NOTES)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_order(program: Callable[..., Any], grad: bool) -> None:
    expected = notes(program, grad)
    actual = notes(torch.compile(program, backend="opforge", fullgraph=True, options={"strict": True}), grad)
    assert len(expected) == len(actual)
    for e, a in zip(expected, actual, strict=True):
        assert a == (pytest.approx(e, rel=1e-6) if e != "between" else e)


def test_writes_to_inputs_come_between() -> None:
    def program(x: torch.Tensor) -> None:
        SAY(x, 1)
        x.mul_(2)
        SAY(x, 2)

    for run in (program, torch.compile(program, backend="opforge", fullgraph=True, options={"strict": True})):
        NOTES.clear()
        run(torch.ones(3))
        assert NOTES == [(1, 1.0), (2, 2.0)]


def test_print(capfd: pytest.CaptureFixture[str]) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._print("first")
        y = x + 1
        torch.ops.aten._print("second")
        return y

    run = torch.compile(program, backend="opforge", fullgraph=True, options={"strict": True})
    run(torch.ones(2))
    assert capfd.readouterr().out.split() == ["first", "second"]
    run(torch.ones(2))
    assert capfd.readouterr().out.split() == ["first", "second"]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_assertions_hold_before_inputs_change(grad: bool) -> None:
    """An assertion was lost: nothing reads its result. It stops the program before an input is written."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        torch._assert_async(x.sum() > 0, "the sum must be positive")
        return (x * w).sum()

    run = torch.compile(program, backend="opforge", fullgraph=True, options={"strict": True})
    w = torch.ones(2, requires_grad=grad)
    assert run(torch.ones(2), w) == 4
    x = torch.full((2,), -3.0)
    with pytest.raises(RuntimeError, match="must be positive"):
        run(x, w)
    assert x.tolist() == [-3, -3], "nothing was written"


def test_assert_tensor_metadata() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._assert_tensor_metadata(x, dtype=torch.float32)
        return x + 1

    run = torch.compile(program, backend="opforge", fullgraph=True, options={"strict": True})
    assert run(torch.ones(2)).tolist() == [2, 2]


def test_tokens_of_an_exported_program_pass_through() -> None:
    graph = torch.fx.Graph()
    token, x = graph.placeholder("token"), graph.placeholder("x")
    pair = graph.call_function(with_effects, (token, SAY.default, x, 1))
    after = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    again = graph.call_function(
        with_effects, (graph.call_function(operator.getitem, (pair, 0)), NOTE.default, after, 2)
    )
    parts = [graph.call_function(operator.getitem, (again, k)) for k in (0, 1)]
    graph.output(tuple(parts))
    gm = torch.fx.GraphModule({}, graph)
    with torch.no_grad():
        traced = trace(gm, [torch.empty(0), torch.ones(2)])
        assert not any(n.target is with_effects for n in traced.graph.graph.nodes)
        first = torch.empty(0)
        NOTES.clear()
        given_back, result = bind(traced, traced.graph)(first, torch.ones(2))
    assert given_back is first
    assert result.tolist() == [4, 4]
    assert NOTES == [(1, 1.0), (2, 2.0)]
