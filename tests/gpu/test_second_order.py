"""Gradients of gradients on a GPU, replayed from CUDA graphs too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import opforge
from tests.programs.test_second_order import PROGRAMS, Energy, forces, same, twice

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_gradients_are_eagers(name: str) -> None:
    program, given = PROGRAMS[name]
    given = [t.cuda() for t in given]
    torch._dynamo.reset()
    run = torch.compile(program, backend="opforge", options={"strict": True})
    same(twice(run, given), twice(program, given))


@pytest.mark.parametrize("options", [{}, {"cudagraphs": True}], ids=["launched", "replayed"])
def test_training_on_forces(options: dict[str, Any]) -> None:
    plain, ours = Energy().cuda(), Energy().cuda()
    expected = forces(plain, plain, 8)
    torch._dynamo.reset()
    opforge.reset_stats()
    found = forces(torch.compile(ours, backend="opforge", options={"strict": True} | options), ours, 8)
    assert not opforge.stats()["fallbacks"]
    assert found == pytest.approx(expected, rel=1e-8)
    same([*ours.parameters()], [*plain.parameters()])
