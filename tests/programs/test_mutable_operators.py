"""Operators of a user that write to their arguments: their kernels run on copies, the rest of the graph is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opforge
from opforge.runtime.torch_compat import minor_version


@torch.library.custom_op("opforge_test::accumulate", mutates_args={"out"})
def accumulate(x: Tensor, out: Tensor, times: int = 2) -> None:
    out.add_(x * times)


@torch.library.custom_op("opforge_test::exchange", mutates_args={"a", "b"})
def exchange(a: Tensor, b: Tensor) -> Tensor:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
    return a - b


@exchange.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.empty_like(a)


@torch.library.custom_op("opforge_test::double_all", mutates_args={"tensors"})
def double_all(tensors: list[Tensor]) -> None:
    for t in tensors:
        t.mul_(2)


@torch.library.custom_op("opforge_test::add_to_some", mutates_args={"tensors", "last"})
def add_to_some(x: Tensor, tensors: list[Tensor | None], last: Tensor | None = None) -> Tensor:
    for t in (*tensors, last):
        if t is not None:
            t.add_(x)
    return x.sum()


@add_to_some.register_fake
def _(x: Tensor, tensors: list[Tensor | None], last: Tensor | None = None) -> Tensor:
    return x.new_empty(())


def _own(x: Tensor, y: Tensor) -> Any:
    z = y * 2
    accumulate(x.sin(), z)
    return z.cos()


def _input(x: Tensor, y: Tensor) -> Any:
    accumulate(x * 2, y, times=3)
    return y.sin()


def _view(x: Tensor, y: Tensor) -> Any:
    accumulate(x[1:], y[1:])
    accumulate(x[:2], y[:2])
    return y.sin()


def _both(x: Tensor, y: Tensor) -> Any:
    d = exchange(x, y)
    return d + x * 3 + y


def _list(x: Tensor, y: Tensor) -> Any:
    z = x + 1
    double_all([x, z, y[1:]])
    double_all([])
    return z.sin() + x


def _optional(x: Tensor, y: Tensor) -> Any:
    z = x + 1
    s = add_to_some(y, [z, x])
    return z + add_to_some(x, [], z) + s


def _branch(x: Tensor, y: Tensor) -> Any:
    def positive(x: Tensor, y: Tensor) -> Tensor:
        z = y.clone()
        accumulate(x, z)
        return z

    return torch.cond(x.sum() > 0, positive, lambda x, y: y + 1, (x, y))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    "program", [_own, _input, _view, _both, _list, _optional, _branch], ids=lambda p: p.__name__.strip("_")
)
def test_results_and_written_arguments(program: Callable[..., Any], dynamic: bool) -> None:
    if program is _optional and minor_version() in ("2.11", "2.12"):
        pytest.skip("A1: torch before 2.13 does not run such an operator with fake tensors, backend='eager' included")
    torch.manual_seed(0)
    torch._dynamo.reset()
    with opforge.config.patch(strict=True), torch.no_grad():
        compiled = torch.compile(program, backend="opforge", fullgraph=True, dynamic=dynamic)
        for rows in (5, 6) if dynamic else (5,):
            ours = [torch.rand(rows, 7), torch.rand(rows, 7)]
            theirs = [t.clone() for t in ours]
            torch.testing.assert_close(compiled(*ours), program(*theirs))
            torch.testing.assert_close(ours, theirs)
            # Eager counts the writes inside of the kernel too.
            assert [t._version > 0 for t in ours] == [t._version > 0 for t in theirs]
    assert opforge.last_artifacts().externs


def test_the_rest_of_a_training_program_is_compiled() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            total = y.detach().clone()
            accumulate(x.detach(), total)
        return (x * total).sin() + y

    torch._dynamo.reset()
    x, y = torch.rand(5, 7, requires_grad=True), torch.rand(5, 7, requires_grad=True)
    with opforge.config.patch(strict=True):
        ours = torch.compile(program, backend="opforge", fullgraph=True)(x, y)
    theirs = program(x, y)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(t.square().sum(), (x, y)) for t in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_equal_calls_each_run() -> None:
    """Two calls with the same arguments are two writes."""
    calls: list[int] = []

    @torch.library.custom_op("opforge_test::told", mutates_args={"out"})
    def told(out: Tensor) -> None:
        calls.append(1)
        out.add_(1)

    def program(x: Tensor) -> Tensor:
        a, b = x.clone(), x.clone()
        told(a)
        told(b)
        return x + 1

    torch._dynamo.reset()
    with opforge.config.patch(strict=True), torch.no_grad():
        compiled = torch.compile(program, backend="opforge", fullgraph=True)
        calls.clear()
        compiled(torch.rand(3))
    assert len(calls) == 2


def test_a_list_with_none_in_it_is_left_to_eager() -> None:
    """Torch's way to run such an operator on copies copies None too."""
    with torch.library._scoped_library("opforge_test_lists", "DEF") as library:
        library.define("add_all(Tensor(a!)?[] tensors, Tensor x) -> ()")
        library.impl("add_all", lambda tensors, x: [t.add_(x) for t in tensors if t is not None] and None, "CPU")
        library.impl("add_all", lambda tensors, x: None, "Meta")

        def program(x: Tensor) -> Tensor:
            z = x * 2
            torch.ops.opforge_test_lists.add_all([z, None], x)
            return z

        torch._dynamo.reset()
        opforge.reset_stats()
        x = torch.ones(3)
        with torch.no_grad():
            assert torch.equal(torch.compile(program, backend="opforge")(x), torch.full((3,), 3.0))
        (reason,) = opforge.stats()["fallbacks"]
        assert "add_all" in reason


SEEN: list[tuple[int, ...]] = []


@torch.library.custom_op("opforge_test::number", mutates_args={"out"})
def number(out: Tensor, first: float) -> None:
    """Counts from `first` in the elements of `out`."""
    SEEN.append(out.stride())
    out.copy_((torch.arange(out.numel()) + first).view(out.shape))


def _diagonal(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    number(y.diagonal(), 1.0)
    return y * w


def _column(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    number(y[:, 1], 1.0)
    return y[:, 1] * w[:, 0]


def _steps(x: Tensor, w: Tensor) -> Any:
    y = x * 2
    v = y[::2, 1:3]
    number(v, 1.0)
    z = v.sin()
    number(v.t(), 3.0)
    return z * w[::2, 1:3], v


def _input_in_places(x: Tensor, w: Tensor) -> Any:
    number(x[::2, 1], 1.0)
    number(x[0, ::2], 2.0)
    number(x.diagonal(), 5.0)
    return x[:, 1].clone() * w[:, 0], x[:, 1]


def _windows(x: Tensor, w: Tensor) -> Any:
    y = x + 1
    v = y.unfold(1, 2, 2)
    number(v, 1.0)
    return y * w, v * 2


def _complex_parts(x: Tensor, w: Tensor) -> Any:
    z = torch.complex(x, x + 1)
    number(torch.view_as_real(z)[..., 1], 2.0)
    number(z.real[:, 0], 5.0)
    return torch.view_as_real(z) * w[..., None]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    "program",
    [_diagonal, _column, _steps, _input_in_places, _windows, _complex_parts],
    ids=lambda p: p.__name__.strip("_"),
)
def test_views_with_gaps_are_written(program: Callable[..., Any], dynamic: bool) -> None:
    """The operator gets a copy with the strides of the view; what autograd keeps of it has no gaps."""
    torch._dynamo.reset()
    with opforge.config.patch(strict=True):
        compiled = torch.compile(program, backend="opforge", fullgraph=True, dynamic=dynamic)
        for n in (4, 6) if dynamic else (4,):
            memory = torch.rand(3 * n, n)
            results = []
            for f in (compiled, program):
                SEEN.clear()
                x, w = memory.clone()[n : 2 * n], torch.full((n, n), 2.0).requires_grad_()
                out = f(x, w)
                first, *rest = out if isinstance(out, tuple) else (out,)
                first.sum().backward()
                results.append(([first.detach(), *rest, x, w.grad], list(SEEN)))
            (ours, strides), (theirs, expected) = results
            torch.testing.assert_close(ours, theirs)
            assert [t.stride() for t in ours] == [t.stride() for t in theirs]
            assert strides == expected
