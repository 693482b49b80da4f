"""What is found of a mask's elements is so: random masks, judged by their elements."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from opforge.runtime.dispatch.record.known import Truth
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.lower import known

STEPS = 5
Mask = Callable[[], Tensor]


def random_mask(rng: random.Random, depth: int = 3) -> Mask:
    """A function that makes a boolean tensor which broadcasts to STEPS x STEPS, by operators that a mask may be made by."""
    rows, columns = torch.arange, torch.arange
    k = rng.randint(-STEPS, STEPS)
    if depth == 0 or rng.random() < 0.2:
        compare = rng.choice([torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne])
        return rng.choice(
            [
                lambda: compare(columns(STEPS)[None] + k, rows(STEPS)[:, None]),
                lambda: compare(rows(STEPS)[:, None] * 2 - k, columns(STEPS)[None]),
                lambda: compare(rows(STEPS)[:, None], k),
                lambda: compare(columns(STEPS)[None], k),
                lambda: torch.ones(STEPS, STEPS, dtype=torch.bool).tril(k),
                lambda: torch.ones(STEPS, STEPS, dtype=torch.int64).triu(k) == 0,
                lambda: torch.full((STEPS, 1), k > 0),
                lambda: torch.zeros(STEPS, STEPS).tril(k) < 1,
            ]
        )
    a, b, c = (random_mask(rng, depth - 1) for _ in range(3))
    return rng.choice(
        [
            lambda: a() & b(),
            lambda: torch.logical_and(a(), b()),
            lambda: a() | b(),
            lambda: ~a(),
            lambda: torch.logical_not(a()),
            lambda: torch.where(a(), b(), c()),
            lambda: torch.where(a(), 1.0, 0.0).bool(),
            lambda: torch.where(a(), -1, 2) > k,
            lambda: a().expand(STEPS, STEPS).mT,
            lambda: a().expand(STEPS, STEPS).clone().masked_fill(b(), k > 0),
        ]
    )


def found_of(mask: Mask) -> Truth:
    """What `truth` says of a mask in a traced program, and nothing where it is not asked."""
    answers: list[Truth] = []

    def ask(node: fx.Node, constants: Mapping[str, Tensor]) -> Truth:
        answers.append(known.truth(node, constants))
        return answers[-1]

    q = torch.randn(1, 1, STEPS, 4)
    trace(lambda q: F.scaled_dot_product_attention(q, q, q, mask()), (q,), truth=ask)
    return answers[0]


@pytest.mark.parametrize("by_value", [False, True], ids=["expression", "value"])
@pytest.mark.parametrize("seed", range(40))
def test_what_is_found_is_so(seed: int, by_value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_value:
        monkeypatch.setattr(known, "LARGE", -1)
    mask = random_mask(random.Random(seed))
    found, elements = found_of(mask), mask().expand(STEPS, STEPS)
    triangle = torch.ones(STEPS, STEPS, dtype=torch.bool).tril()
    exact = Truth(bool(elements.all()), bool((elements == triangle).all()))
    assert found in (exact, Truth())


def test_much_is_found() -> None:
    """Of masks that are all true, most are found, with the floats among them, which are not computed."""
    counted: list[bool] = []
    for seed in range(200):
        mask = random_mask(random.Random(seed), 2)
        elements = mask().expand(STEPS, STEPS)
        if bool(elements.all()):
            counted.append(found_of(mask).everywhere)
    assert len(counted) > 10
    assert counted.count(True) > 0.7 * len(counted)


def test_large_masks_and_long_chains_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    squares: Any = lambda: (torch.arange(STEPS)[:, None] - torch.arange(STEPS)) ** 2 >= 0  # noqa: E731
    assert found_of(squares).everywhere
    monkeypatch.setattr(known, "LARGE", 4)
    assert found_of(squares) == Truth()
    monkeypatch.setattr(known, "MOST", 2)
    assert (
        found_of(lambda: torch.ones(STEPS, STEPS, dtype=torch.bool) & torch.ones(STEPS, 1, dtype=torch.bool)) == Truth()
    )


def test_expressions_that_double_take_no_time() -> None:
    def doubled() -> Tensor:
        mask = torch.ones(STEPS, STEPS, dtype=torch.bool).tril()
        for _ in range(28):
            mask = mask & mask.mT
        return mask | ~mask

    def moved() -> Tensor:
        mask = torch.ones(1 << 12, 1, dtype=torch.bool).cumsum(0) > 3
        for k in range(9):
            mask = mask[: -(1 << k)] & mask[1 << k :]
        return mask[:STEPS].expand(STEPS, STEPS)

    for mask in (doubled, moved):
        before = time.perf_counter()
        found_of(mask)
        assert time.perf_counter() - before < 20
