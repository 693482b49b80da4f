"""The products of all slices of a tensor with one matrix are one product (`specs/rewrites.yaml`): a recurrent cell's over its inputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import opforge
from tests.support.accuracy import assert_as_accurate


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    opforge.reset_stats()
    torch.manual_seed(0)
    yield
    assert not opforge.stats()["fallbacks"], "nothing here should run eagerly as a whole"


class Cells(nn.Module):
    """The last state of a cell over [T, B, 32], or [B, T, 32] with `batch_first`: [B, 48]."""

    def __init__(self, cell: type[nn.RNNCellBase] = nn.LSTMCell, batch_first: bool = False, kept: bool = True) -> None:
        super().__init__()
        self.cell, self.batch_first, self.kept = cell(32, 48), batch_first, kept

    def forward(self, xs: Tensor) -> Tensor:
        state: Any = xs.new_zeros(xs.shape[0 if self.batch_first else 1], 48)
        if isinstance(self.cell, nn.LSTMCell):
            state = (state, state)
        for t in range(xs.shape[1 if self.batch_first else 0]):
            x = xs[:, t] if self.batch_first else xs[t]
            state = self.cell(x, state) if self.kept else checkpoint(self.cell, x, state, use_reentrant=False)
        return state[0] if isinstance(state, tuple) else state


def externs() -> dict[str, int]:
    return dict(opforge.last_artifacts().externs)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(cell: type[nn.RNNCellBase], batch_first: bool) -> None:
    model, xs = Cells(cell, batch_first), torch.randn(*((16, 5) if batch_first else (5, 16)), 32)
    with torch.no_grad():
        found = torch.compile(model, backend="opforge", options={"strict": True})(xs)
        assert_as_accurate(found, model(xs), copy.deepcopy(model).double()(xs.double()))
    assert externs() == {"aten.addmm.default": 5 + 1}


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("batch_first", [False, True])
def test_gradients(batch_first: bool, kept: bool) -> None:
    model, xs = Cells(nn.LSTMCell, batch_first, kept), torch.randn(*((16, 5) if batch_first else (5, 16)), 32)
    exact = copy.deepcopy(model).double()

    def gradients(fn: Any, of: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        return list(torch.autograd.grad(fn(x).square().sum(), [x, *of.parameters()]))

    found = gradients(torch.compile(model, backend="opforge", options={"strict": True}), model, xs)
    for f, e, x in zip(found, gradients(model, model, xs), gradients(exact, exact, xs.double()), strict=True):
        assert_as_accurate(f, e, x)


@pytest.mark.parametrize("batch_first", [False, True])
def test_under_autocast(batch_first: bool) -> None:
    model, xs = Cells(nn.LSTMCell, batch_first), torch.randn(*((16, 5) if batch_first else (5, 16)), 32)

    def step(xs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(xs)

    with torch.no_grad():
        found = torch.compile(step, backend="opforge", options={"strict": True})(xs)
        assert_as_accurate(found, step(xs), copy.deepcopy(model).double()(xs.double()))
    assert externs() == {"aten.addmm.default": 5 + 1}


def test_sizes_that_change() -> None:
    model = Cells()
    fn = torch.compile(model, backend="opforge", options={"strict": True}, dynamic=True)
    with torch.no_grad():
        for batch in (16, 7, 33):
            xs = torch.randn(5, batch, 32)
            assert_as_accurate(fn(xs), model(xs), copy.deepcopy(model).double()(xs.double()))
    assert opforge.stats()["graphs"] == 1
    assert externs() == {"aten.addmm.default": 5 + 1}


def test_sizes_of_the_matrix_that_change() -> None:
    """They stay symbols: no product is joined, and one graph serves all."""
    fn = torch.compile(
        lambda xs, w: [(x @ w).tanh() for x in xs.unbind()], backend="opforge", options={"strict": True}, dynamic=True
    )
    for n in (80, 96, 128):
        xs, w = torch.randn(4, 16, 64), torch.randn(64, n)
        for f, x in zip(fn(xs, w), xs, strict=True):
            assert_as_accurate(f, (x @ w).tanh(), (x.double() @ w.double()).tanh())
    assert opforge.stats()["graphs"] == 1


def test_a_slice_at_a_place_that_changes() -> None:
    fn = torch.compile(
        lambda xs, w, k: (xs[k.shape[0] - 1] @ w).tanh(), backend="opforge", options={"strict": True}, dynamic=True
    )
    xs, w = torch.randn(4, 16, 64), torch.randn(64, 64)
    for n in (2, 3, 4):
        found = fn(xs, w, torch.zeros(n))
        assert_as_accurate(found, (xs[n - 1] @ w).tanh(), (xs[n - 1].double() @ w.double()).tanh())


def test_parts_of_the_results_to_the_caller() -> None:
    """Views of a product are views of it alone."""
    w = torch.randn(64, 64)

    def fn(xs: Tensor) -> list[Tensor]:
        return [(x @ w)[:, 1:3] for x in xs]

    xs = torch.randn(4, 16, 64)
    for f, e in zip(torch.compile(fn, backend="opforge", options={"strict": True})(xs), fn(xs), strict=True):
        assert (f.stride(), f.storage_offset(), f.untyped_storage().nbytes()) == (
            e.stride(),
            e.storage_offset(),
            e.untyped_storage().nbytes(),
        )
        torch.testing.assert_close(f, e)


def test_a_tensor_that_is_written_between() -> None:
    w = torch.randn(64, 64)

    def fn(xs: Tensor) -> Tensor:
        found = []
        for t in range(len(xs)):
            found.append((xs[t] @ w.to(xs.dtype)).tanh())
            if t == 1:
                xs.mul_(2)
        return torch.stack(found)

    xs = torch.randn(4, 16, 64)
    ours, eagers = xs.clone(), xs.clone()
    found = torch.compile(fn, backend="opforge", options={"strict": True})(ours)
    assert_as_accurate(found, fn(eagers), fn(xs.double()))
    assert torch.equal(ours, eagers)


def test_what_is_not_finite_stays_in_its_row() -> None:
    w = torch.randn(64, 64)
    xs = torch.randn(4, 16, 64)
    xs[1, 3] = float("inf")
    xs[2, 5] = float("nan")

    def fn(xs: Tensor) -> Tensor:
        return torch.stack([(x @ w.to(x.dtype)).tanh() for x in xs])

    found = torch.compile(fn, backend="opforge", options={"strict": True})(xs)
    assert_as_accurate(found, fn(xs), fn(xs.double()))
    assert externs() == {"aten.mm.default": 1}


def test_results_to_the_caller_are_tensors_of_their_own() -> None:
    w = torch.randn(64, 64)

    def fn(xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x @ w for x in xs)

    xs = torch.randn(4, 16, 64)
    found = torch.compile(fn, backend="opforge", options={"strict": True})(xs)
    assert len({t.untyped_storage().data_ptr() for t in found}) == 4
    for f, e in zip(found, fn(xs), strict=True):
        torch.testing.assert_close(f, e)
