"""Inputs that must not meet in memory: one look at all of them finds what a comparison of all pairs finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import opforge
from opforge.generated.schemas import DisjointInfo
from opforge.runtime.dispatch.storage.disjoint import Meeting, pairs


class At:
    """As much of a tensor as is asked for."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


INPUTS = st.lists(
    st.tuples(
        st.integers(0, 60), st.integers(-4, 12), st.booleans(), st.sampled_from([None, None, 0, 1]), st.booleans()
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=400, deadline=None)
@given(INPUTS, st.data())
def test_as_by_all_pairs(inputs: list[tuple[int, int, bool, int | None, bool]], data: Any) -> None:
    found = [DisjointInfo(k, n, w, "cpu", (), b, s) for k, (_, n, w, b, s) in enumerate(inputs)]
    addresses = [a for a, *_ in inputs]
    allowed = [(a, b) for a, b in pairs(found) if data.draw(st.integers(0, 3)) == 0]
    for a, b in allowed:
        distance = addresses[b.input] - addresses[a.input] + data.draw(st.integers(0, 1))
        old = found[a.input]
        found[a.input] = replace(old, distances=(*old.distances, (b.input, distance)))
    wanted = any(
        min(inputs[a.input][1], inputs[b.input][1]) > 0
        and addresses[a.input] < addresses[b.input] + inputs[b.input][1]
        and addresses[b.input] < addresses[a.input] + inputs[a.input][1]
        and all(addresses[b.input] - addresses[a.input] != n for i, n in a.distances if i == b.input)
        for a, b in pairs(found)
    )
    meeting = Meeting(found)
    spans = tuple(n for _, n, *_ in inputs)
    tensors: list[Any] = [At(a) for a in addresses]
    assert meeting(spans, *tensors) is wanted
    assert meeting(spans, *tensors) is wanted  # also of addresses that are known


@pytest.mark.parametrize("count", [4, 40])
def test_many_inputs_that_meet(count: int) -> None:
    """Whether pairs are compared line by line or not, and after calls in which all was well."""

    def f(*inputs: torch.Tensor) -> torch.Tensor:
        total = inputs[0].clone()
        for x in inputs:
            x.mul_(2)
            total += x
        return total

    torch._dynamo.reset()
    opforge.reset_stats()
    run = torch.compile(f, backend="opforge", dynamic=False)
    memory = torch.arange(8.0 * count)
    apart = [memory[8 * k : 8 * k + 8].clone() for k in range(count)]
    for inputs in (apart, apart, [memory[4 * k : 4 * k + 8].clone() for k in range(count)]):
        copies = [x.clone() for x in inputs]
        torch.testing.assert_close(run(*inputs), f(*copies))
        torch.testing.assert_close(inputs, copies)
    assert opforge.stats()["fallbacks"] == {}
    for inputs in ([memory[4 * k : 4 * k + 8] for k in range(count)], [*apart[1:], apart[1][:]]):
        base = torch.cat([x.reshape(-1) for x in inputs]) if inputs[0]._base is None else inputs[0]._base
        before = [x.clone() for x in inputs]
        got = run(*inputs).clone(), [x.clone() for x in inputs]
        for x, b in zip(inputs, before, strict=True):
            x.copy_(b)
        assert base is not None
        want = f(*inputs)
        torch.testing.assert_close(got, (want, [x.clone() for x in inputs]))


def test_many_inputs_make_no_long_wrapper() -> None:
    """Its lines grow with the inputs, not with their pairs."""
    from opforge.runtime.dispatch.trace import trace
    from opforge.runtime.dispatch.wrapper.source import emit_wrapper

    def f(*inputs: torch.Tensor) -> None:
        for x in inputs:
            x.add_(1)

    with torch.no_grad():
        lines = emit_wrapper(trace(f, [torch.ones(2) for _ in range(100)]), "compiled").splitlines()
    assert len(lines) < 4 * 100
