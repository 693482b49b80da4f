"""Graphs with Python numbers that change run eagerly; the reason says the line and what helps, and what it says does help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import opforge

ADVICE = (
    "; make it a tensor (an optimizer: lr=torch.tensor(...)), or a number that is known at compile time (dynamic=False)"
)
NUMBER = "UnsupportedError: a Python number that changes between calls (a symbolic float) is "


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    opforge.reset_stats()
    yield
    torch._dynamo.reset()


def program(x: torch.Tensor, a: Any) -> torch.Tensor:
    y = x + 1
    return y * a


def reasons(fn: Any, *numbers: Any) -> list[str]:
    for a in numbers:
        torch.testing.assert_close(fn(torch.ones(3), a), program(torch.ones(3), a))
    return list(opforge.stats()["fallbacks"])


def test_the_reason_says_the_line_and_what_to_do() -> None:
    """`argument zuf0 is a symbolic float` was said."""
    (reason,) = reasons(torch.compile(program, backend="opforge"), 1.5, 2.5, 3.5)
    head, _, rest = reason.partition("test_symbolic_floats.py:")
    assert head == f"{NUMBER}an argument of mul ("
    assert rest.lstrip("0123456789") == f" in program): return y * a{ADVICE}"


def test_what_the_advice_names_is_compiled() -> None:
    compiled = torch.compile(program, backend="opforge", fullgraph=True)
    assert reasons(compiled, *map(torch.tensor, (1.5, 2.5, 3.5))) == []
    assert opforge.stats()["graphs"] == 1
    compiled = torch.compile(program, backend="opforge", dynamic=False)
    assert reasons(compiled, 1.5, 2.5, 3.5) == []


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_a_learning_rate_that_changes(lr: Any) -> None:
    layer = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr, foreach=False)
    layer(torch.ones(2, 3)).sum().backward()
    step = torch.compile(optimizer.step, backend="opforge")
    for k in (1, 2, 3):
        optimizer.param_groups[0]["lr"] = lr * k
        step()
    found = list(opforge.stats()["fallbacks"])
    if isinstance(lr, float):
        # All frames are torch's own: the innermost is told.
        assert len(found) == 1
        assert found[0].startswith(f"{NUMBER}an argument of add (sgd.py:")
        assert found[0].endswith(ADVICE)
    else:
        assert found == []
