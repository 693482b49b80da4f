"""Gradients of tables that are looked up with `sparse=True` are sparse, as eager's, and what is around them is compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opforge


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3, sparse=True)
        self.layer = nn.Linear(3, 3)

    def forward(self, k: Tensor) -> Any:
        return self.layer(self.table(k)).tanh()


class Twice(Net):
    def forward(self, k: Tensor) -> Any:
        return self.layer(self.table(k)).tanh() * self.table(k + 1)


class Tied(Net):
    """The table is a factor as well: a dense gradient and sparse ones are added."""

    def forward(self, k: Tensor) -> Any:
        return F.linear(self.table(k).tanh(), self.table.weight).sum() + self.table(k + 1).sin().sum()


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, 3, sparse=True, mode="sum")

    def forward(self, k: Tensor) -> Any:
        return self.table(k.view(2, -1)).tanh()


class Gather(Net):
    def forward(self, k: Tensor) -> Any:
        return torch.gather(self.table.weight, 0, k.view(-1, 1).expand(-1, 3), sparse_grad=True).tanh()


class Padded(Net):
    """Rows of padding have no gradient: how many are left, only data tells."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3, sparse=True, padding_idx=1)


class Bags(nn.Module):
    """Weights, which need the numbers of bags that eager's kernel computes again, and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, 3, sparse=True, mode="sum", padding_idx=1)

    def forward(self, k: Tensor) -> Any:
        bags = k.view(2, -1)
        mean = F.embedding_bag(bags, self.table.weight, mode="mean", sparse=True, padding_idx=2)
        return self.table(bags).tanh() * self.table(bags, per_sample_weights=bags.sin()).tanh() + mean.sin()


def train(model: nn.Module, call: Any, k: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    out = call(k)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    return [p.grad for p in model.parameters()]


def check(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is None or b is None:
            continue
        assert (a.layout, a.shape, a.dtype) == (b.layout, b.shape, b.dtype)
        if b.is_sparse:
            assert a.is_coalesced() == b.is_coalesced()
            assert torch.equal(a._indices(), b._indices())
            torch.testing.assert_close(a._values(), b._values())
        torch.testing.assert_close(a.to_dense(), b.to_dense())


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("program", [Net, Twice, Tied, Bag, Gather, Padded, Bags])
def test_gradients_are_those_of_eager(program: type[nn.Module], dynamic: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = program()
    other = copy.deepcopy(plain)
    with opforge.config.patch(strict=True):
        compiled = torch.compile(other, backend="opforge", fullgraph=True, dynamic=dynamic)
        pairs = []
        for n in (4, 6, 4) if dynamic else (4, 4):
            k = torch.randint(0, 9, (n,))
            pairs.append((train(other, compiled, k), train(plain, plain, k)))
            for ours, theirs in pairs:  # later calls write over nothing that a gradient is made of
                check(ours, theirs)


def test_nothing_but_padding() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = Padded()
    other = copy.deepcopy(plain)
    with opforge.config.patch(strict=True):
        compiled = torch.compile(other, backend="opforge", fullgraph=True)
        for k in ([1, 1, 1], [1, 0, 1], [1, 1, 1], [2, 3, 4]):
            check(train(other, compiled, torch.tensor(k)), train(plain, plain, torch.tensor(k)))


class Two(Net):
    def forward(self, k: Tensor) -> Any:
        return self.table(k).tanh(), self.layer(self.table(k + 1)).sin()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
def test_rows_of_a_result_without_a_gradient_are_left_out(dynamic: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    opforge.reset_stats()
    plain = Two()
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, backend="opforge", dynamic=dynamic)
    for n in (4, 6):
        k = torch.randint(0, 9, (n,))
        check(train(other, compiled, k), train(plain, plain, k))
    if not dynamic:
        assert not opforge.stats()["fallbacks"]


def test_a_step_of_sparse_adam() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = Net()
    other = copy.deepcopy(plain)
    with opforge.config.patch(strict=True):
        compiled = torch.compile(other, backend="opforge", fullgraph=True)
        optimizers = [torch.optim.SparseAdam(m.table.parameters(), lr=0.1) for m in (plain, other)]
        for _ in range(3):
            k = torch.randint(0, 9, (4,))
            train(other, compiled, k)
            train(plain, plain, k)
            for o in optimizers:
                o.step()
    torch.testing.assert_close(other.table.weight, plain.table.weight)


def test_a_gradient_that_is_computed_with_is_left_to_eager() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    opforge.reset_stats()

    class Scaled(Net):
        def forward(self, k: Tensor) -> Any:
            return F.embedding(k, self.table.weight * 2, sparse=True).tanh()

    plain = Scaled()
    other = copy.deepcopy(plain)
    k = torch.tensor([1, 3, 1, 7])
    check(train(other, torch.compile(other, backend="opforge"), k), train(plain, plain, k))
    (reason,) = opforge.stats()["fallbacks"]
    assert "sparse gradient" in reason
