"""Recurrent layers that a library computes whole: only the operator's own gradient can read the workspace that it returns."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opforge
from opforge.runtime.torch_compat import minor_version

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "both directions, two layers": {"bidirectional": True, "num_layers": 2},
    "batches first": {"batch_first": True, "num_layers": 2},
    "no bias": {"bias": False},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.fixture(autouse=True)
def whole_layers() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True), opforge.config.patch(strict=True):
        yield


def gradients(model: nn.Module, given: Tensor, call: Any) -> list[Tensor]:
    x = given.clone().requires_grad_()
    out, (h, c) = call(x)
    wanted = [x, *model.parameters()]
    return [out, h, c, *torch.autograd.grad(out.sin().sum() + c.square().sum(), wanted)]


@pytest.mark.parametrize(("name", "dynamic"), [*((name, False) for name in LAYERS), ("batches first", True)])
def test_an_lstm_is_trained(name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    plain = nn.LSTM(3, 4, **LAYERS[name])
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, backend="opforge", fullgraph=True, dynamic=dynamic)
    if dynamic and minor_version() in ("2.11", "2.12"):
        with opforge.config.patch(strict=False):
            torch.testing.assert_close(gradients(other, torch.randn(5, 2, 3), compiled)[1].shape, (2, 5, 4))
        assert "a dimension too many" in str(opforge.stats()["fallbacks"])
        return
    for steps in (5, 7) if dynamic else (5,):
        x = torch.randn(steps, 2, 3, dtype=plain.weight_ih_l0.dtype)
        ours, theirs = gradients(other, x, compiled), gradients(plain, x, plain)
        torch.testing.assert_close(ours, theirs)
        assert [t.stride() for t in ours[:3]] == [t.stride() for t in theirs[:3]]


def test_two_calls_before_a_backward_keep_two_workspaces() -> None:
    torch.manual_seed(0)
    plain = nn.LSTM(3, 4)
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, backend="opforge", fullgraph=True)
    batches = [torch.randn(5, 2, 3) for _ in range(2)]
    for call in (plain, compiled):
        losses = [call(x)[0].sin().sum() for x in batches]
        for loss in reversed(losses):
            loss.backward()
    for p, q in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


def test_without_gradients_no_workspace_is_made() -> None:
    torch.manual_seed(0)
    plain = nn.LSTM(3, 4)
    x = torch.randn(5, 2, 3)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(plain, backend="opforge", fullgraph=True)(x), plain(x))
    source = opforge.last_artifacts().wrapper
    assert "keeping_workspace" not in source


@pytest.mark.parametrize("layer", [nn.GRU, nn.RNN])
def test_other_recurrent_layers_are_trained(layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = layer(3, 4)
    other = copy.deepcopy(plain)
    x = torch.randn(5, 2, 3)
    plain(x)[0].sin().sum().backward()
    torch.compile(other, backend="opforge", fullgraph=True)(x)[0].sin().sum().backward()
    for p, q in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
