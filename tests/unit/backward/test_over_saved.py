"""Backwards that may write over what was saved: which of their programs is compiled, and what is left where compiling is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from opforge.runtime.backward.function import bind_function
from opforge.runtime.backward.variants import Boxed, Variants, interpreted
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.training import split

ROWS, COLUMNS = 512, 1024


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x * 2, -1).cos()


def loss(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.arange(ROWS) % 7)


class Bound:
    """A compiled training graph whose programs run by eager kernels. made: of each program that was compiled, whether it writes in place."""

    def __init__(self, f: Callable[[Tensor], Tensor], *failing: BaseException | None) -> None:
        self.f, self.failing = f, [*failing]
        self.made: list[bool] = []
        torch.manual_seed(0)
        self.x = torch.rand(ROWS, COLUMNS, requires_grad=True)
        parts = split(trace(f, [self.x], training=True))
        assert parts.backward.into

        def forward(*args: Any) -> Any:
            with torch.no_grad():
                return parts.forward(*args)

        self._call = bind_function(parts.backward, forward, Variants(parts.backward, self.compile))

    def compile(self, graph: fx.GraphModule, into: Mapping[int, int]) -> Boxed:
        if self.failing and (error := self.failing.pop(0)) is not None:
            raise error
        self.made.append(bool(into))
        return interpreted(graph, into)

    def __call__(self) -> Tensor:
        (y,) = self._call(self.x)
        return y

    def check(self, got: Tensor, factor: float) -> None:
        (want,) = torch.autograd.grad(self.f(self.x).sum() * factor, self.x)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("f", [softmax, loss])
def test_only_the_program_that_runs_is_compiled(f: Callable[[Tensor], Tensor]) -> None:
    bound = Bound(f)
    for _ in range(2):
        bound.check(torch.autograd.grad(bound().sum() * 3, bound.x)[0], 3)
    assert bound.made == [True]


def test_gradients_that_are_there_already_need_no_program() -> None:
    bound = Bound(loss)
    bound.check(torch.autograd.grad(bound(), bound.x)[0], 1)
    assert bound.made == []


@pytest.mark.parametrize("f", [softmax, loss])
def test_a_graph_that_is_retained_needs_the_plain_one(f: Callable[[Tensor], Tensor]) -> None:
    bound = Bound(f)
    y = bound().sum() * 3
    bound.check(torch.autograd.grad(y, bound.x, retain_graph=True)[0], 3)
    assert bound.made == [False]
    bound.check(torch.autograd.grad(y, bound.x)[0], 3)
    assert bound.made == [False, True]


def test_who_holds_what_was_saved_keeps_it() -> None:
    bound = Bound(softmax)
    y = bound().sum()
    (held,) = y.grad_fn.next_functions[0][0].saved_tensors
    before = held.clone()
    bound.check(torch.autograd.grad(y, bound.x)[0], 1)
    assert torch.equal(held, before)
    assert bound.made == [False]


@pytest.mark.parametrize("f", [softmax, loss])
@pytest.mark.parametrize("holds", [False, True])
def test_with_hooks_both_are_there_before_anything_is_given_up(f: Callable[[Tensor], Tensor], holds: bool) -> None:
    bound, held = Bound(f), list[Tensor]()

    def unpack(t: Tensor) -> Tensor:
        held.extend([t] * holds)
        return t

    with saved_tensors_hooks(lambda t: t.clone(), unpack):
        y = bound().sum() * 3
    bound.check(torch.autograd.grad(y, bound.x)[0], 3)
    assert sorted(bound.made) == [False, True]


@pytest.mark.parametrize("f", [softmax, loss])
@pytest.mark.parametrize(("hooked", "at"), [(False, 0), (True, 0), (True, 1)])
def test_what_is_interrupted_can_be_asked_for_again(f: Callable[[Tensor], Tensor], hooked: bool, at: int) -> None:
    """With hooks two programs are compiled, and either may be interrupted."""
    bound = Bound(f, *[None] * at, KeyboardInterrupt())
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t) if hooked else nullcontext():
        y = bound()
    tangent = torch.full(y.shape, 3.0)  # given to the graph itself: nodes of eager's give up what they have saved
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(y, bound.x, tangent)
    bound.check(torch.autograd.grad(y, bound.x, tangent)[0], 3)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, bound.x, tangent)


def test_threads_that_run_one_backward_each() -> None:
    bound = Bound(softmax)
    losses, got = [bound().sum() for _ in range(4)], dict[int, Tensor]()

    def run(k: int) -> None:
        got[k] = torch.autograd.grad(losses[k], bound.x)[0]

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for k in range(4):
        bound.check(got[k], 1)
    assert bound.made == [True]
