"""The backward of a training graph: compiled when it first runs, by eager kernels where that fails, freeing what was saved as it runs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import opforge
from opforge.errors import BuildError, OpforgeWarning, UnsupportedError
from opforge.runtime import fallback, training
from opforge.runtime.execute.support import Arena, Workspaces
from opforge.testing.noise import Noise

pytestmark = pytest.mark.usefixtures("fresh_stats")


def f(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x @ w).sin().sum()


def inputs(rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)


def compiled(**options: Any) -> Callable[..., Tensor]:
    return torch.compile(f, backend="opforge", dynamic=False, options=options)


def same(got: tuple[Tensor, ...], args: tuple[Tensor, ...]) -> None:
    exact = [t.detach().double().requires_grad_() for t in args]
    truth = torch.autograd.grad(f(*exact), exact)
    # Which of the library's kernels multiplies depends on the processor, and one of them may have luck: eager also runs with moved roundings.
    runs = [torch.autograd.grad(f(*args), args)]
    for seed in range(4):
        with Noise(seed):
            runs.append(torch.autograd.grad(f(*args), args))
    for g, e, *wants in zip(got, truth, *runs, strict=True):
        floor = torch.finfo(torch.float32).eps * float(e.abs().max())
        assert float((g - e).abs().max()) <= max(floor, *(2 * float((w - e).abs().max()) for w in wants))


def test_compiled_when_it_first_runs() -> None:
    args = inputs()
    y = compiled()(*args)
    made = opforge.last_artifacts()
    assert made.backward is None
    before = opforge.stats()["kernels"]
    same(torch.autograd.grad(y, args), args)
    assert made.backward is not None
    assert opforge.stats()["kernels"] == before + made.backward.kernels
    assert opforge.stats()["graphs"] == 1


def test_compiled_with_the_forward_on_demand() -> None:
    compiled(lazy_backward=False)(*inputs())
    assert opforge.last_artifacts().backward is not None


def test_symbolic_sizes_are_compiled_at_once() -> None:
    """What compiling assumes of sizes becomes guards of the forward."""
    torch.compile(f, backend="opforge", dynamic=True)(*inputs())
    assert opforge.last_artifacts().backward is not None


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    real = training.compile_graph

    def fail(graph: Any, cfg: Any, watch: Any, *, boxed: bool = False, **rest: Any) -> Any:
        if boxed:
            raise error
        return real(graph, cfg, watch, **rest)

    monkeypatch.setattr(training, "compile_graph", fail)


@pytest.mark.parametrize("error", [UnsupportedError("no way"), BuildError("no compiler"), KeyError("a mistake")])
def test_a_backward_that_cannot_be_compiled_runs_by_eager_kernels(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, error)
    args = inputs()
    y = compiled(debug_verify=False)(*args)  # with checks on, a mistake of opforge's own is raised
    if isinstance(error, UnsupportedError):
        got = torch.autograd.grad(y, args)
    else:
        fallback._warned.clear()
        with pytest.warns(OpforgeWarning, match="eagerly"):
            got = torch.autograd.grad(y, args)
    same(got, args)
    (reason,) = opforge.stats()["fallbacks"]
    assert type(error).__name__ in reason


def test_strict_raises_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    args = inputs()
    with monkeypatch.context() as m:
        failing(m, BuildError("no compiler"))
        y = compiled(strict=True)(*args)
        with pytest.raises(BuildError, match="no compiler"):
            y.backward()
        assert args[0].grad is None
    same(torch.autograd.grad(y, args), args)  # what was saved is still there


def test_threads_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    args = inputs()
    g = compiled()
    losses = [g(*args) for _ in range(4)]
    real, made = training.compile_graph, []

    def count(graph: Any, cfg: Any, watch: Any, *, boxed: bool = False, **rest: Any) -> Any:
        made.append(boxed)
        return real(graph, cfg, watch, boxed=boxed, **rest)

    monkeypatch.setattr(training, "compile_graph", count)
    found: dict[int, tuple[Tensor, ...]] = {}
    threads = [
        threading.Thread(target=lambda k=k: found.setdefault(k, torch.autograd.grad(losses[k], args))) for k in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert made == [True]
    assert len(found) == 4
    for got in found.values():
        same(got, args)


def test_inside_of_a_compiled_step() -> None:
    """Dynamo breaks the graph at `backward()`; what opforge does there is not traced."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        y = f(x, w)
        y.backward()
        return y * 2

    args, plain = inputs(), inputs()
    torch.compile(step, backend="opforge")(*args)
    step(*plain)
    same((args[0].grad, args[1].grad), plain)  # type: ignore[arg-type]
    assert opforge.stats()["fallbacks"] == {}


def test_a_second_backward_needs_retain_graph() -> None:
    args = inputs()
    y = compiled()(*args)
    first = torch.autograd.grad(y, args, retain_graph=True)
    second = torch.autograd.grad(y, args)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, args)


def test_arenas_are_shared_and_given_up() -> None:
    def run(size: int) -> weakref.ref[Arena]:
        spaces = Workspaces(lambda memory: memory[:1], size)
        arena, space = spaces.take()
        assert space.untyped_storage().data_ptr() == arena.memory.data_ptr()
        spaces.give(arena)
        again, same_space = spaces.take()
        assert again is arena
        assert same_space is space
        other, _ = spaces.take()  # a run inside of another one
        assert other is not arena
        spaces.give(again)
        spaces.give(other)
        return weakref.ref(arena)

    found: list[bool] = []

    def work() -> None:
        small = run(1000)
        alive = small() is not None
        run(2000)
        gc.collect()
        found.extend([alive, small() is None])

    t = threading.Thread(target=work)
    t.start()
    t.join()
    assert found == [True, True]
