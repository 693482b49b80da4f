"""Several gradients at once (`is_grads_batched=True`, `vmap`, vectorized jacobians) through a compiled backward, as eager gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import opforge

Program = Callable[..., Any]


def _program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x @ w).sin(), (x * 2).sum(0)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return _random(4, 3).requires_grad_(), _random(3, 5).requires_grad_()


def _batched(run: Program) -> Any:
    x, w = _inputs()
    return torch.autograd.grad(run(x, w), (x, w), (_random(7, 4, 5), _random(7, 3)), is_grads_batched=True)


def _of_one_result(run: Program) -> Any:
    x, w = _inputs()
    return torch.autograd.grad(run(x, w)[1], (x, w), _random(7, 3), is_grads_batched=True, allow_unused=True)


def _one_row(run: Program) -> Any:
    x, w = _inputs()
    return torch.autograd.grad(run(x, w)[0], (x, w), _random(1, 4, 5), is_grads_batched=True)


def _jacobian(run: Program) -> Any:
    x, w = _inputs()
    return torch.autograd.functional.jacobian(lambda a, b: run(a, b), (x.detach(), w.detach()), vectorize=True)


def _vmap(run: Program) -> Any:
    """One of the two gradients is the same in all rows."""
    x, w = _inputs()
    results = run(x, w)
    pull = lambda v: torch.autograd.grad(results, (x, w), (v, torch.ones(3)), retain_graph=True)  # noqa: E731
    return torch.vmap(pull)(_random(6, 4, 5)), pull(_random(4, 5))


def _nested(run: Program) -> Any:
    x, w = _inputs()
    results = run(x, w)
    pull = lambda v, u: torch.autograd.grad(results, (x, w), (v, u), retain_graph=True)  # noqa: E731
    return torch.vmap(torch.vmap(pull, (0, None), 1), (None, 0))(_random(6, 4, 5), _random(2, 3))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("use", [_batched, _of_one_result, _one_row, _jacobian, _vmap, _nested])
def test_gradients_in_rows(use: Callable[[Program], Any], dynamic: bool) -> None:
    torch._dynamo.reset()
    opforge.reset_stats()
    compiled = torch.compile(_program, backend="opforge", dynamic=dynamic)
    torch.testing.assert_close(use(compiled), use(_program))
    assert opforge.stats()["fallbacks"] == {}
    assert opforge.stats()["graphs"] >= 1


def test_saved_tensors_are_given_up_after_the_last_row() -> None:
    torch._dynamo.reset()
    x, w = _inputs()
    y = torch.compile(_program, backend="opforge")(x, w)[0]
    torch.autograd.grad(y, (x, w), _random(2, 4, 5), is_grads_batched=True)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, (x, w), _random(4, 5))


def test_compilers_of_users_see_plain_tensors() -> None:
    run = opforge.aot_function(_program, fw_compiler=opforge.aot.nop)
    torch.testing.assert_close(_batched(run), _batched(_program))


def _three(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x @ w).sin(), (x * v).t(), v.exp().sum()


@pytest.mark.parametrize("given", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_symbolic_sizes_leave_out_gradients_that_nothing_reaches(given: tuple[int, ...]) -> None:
    """An optimizer moves a parameter whose gradient is zeros (momentum, decay), and leaves one that has none."""
    torch._dynamo.reset()
    opforge.reset_stats()
    compiled = torch.compile(_three, backend="opforge", dynamic=True)
    for rows in (4, 6):
        found = []
        for run in (_three, compiled):
            inputs = [t.requires_grad_() for t in (_random(rows, 3), _random(3, 5), _random(rows, 3) / 3)]
            results = run(*inputs)
            torch.autograd.backward([results[k] for k in given], [torch.ones_like(results[k]) for k in given])
            found.append([t.grad for t in inputs])
        assert [g is None for g in found[1]] == [g is None for g in found[0]]
        torch.testing.assert_close(found[1], found[0])
    assert opforge.stats()["fallbacks"] == {}
