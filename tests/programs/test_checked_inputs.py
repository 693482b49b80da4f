"""Graphs that are called without guards refuse inputs that they were not compiled for, before they read anything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import opforge
from opforge.errors import InputError
from tests.fuzz.observe import Direct
from tests.support.matrix import symbolic


def graph() -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(nn.Sequential(nn.GELU(), nn.Tanh()))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(3), r"input 0 has the sizes \[3\], the graph was compiled for \[4, 6\]"),
        (torch.ones(4, 7), r"has the sizes \[4, 7\]"),
        (torch.ones(6, 4).t(), r"has the strides \[1, 4\], the graph was compiled for \[6, 1\]"),
        (torch.ones(4, 6).double(), r"is torch.float64, the graph was compiled for torch.float32"),
        (torch._neg_view(torch.ones(4, 6)), r"is lazily negated"),
        (torch._efficientzerotensor(4, 6), r"conjugated or zero"),
        (torch.ones(4, 6, requires_grad=True), r"requires grad, the graph was compiled for a tensor that does not"),
        (1.0, r"is a float, the graph was compiled for a tensor"),
    ],
)
def test_other_inputs_are_refused(x: object, message: str) -> None:
    with torch.no_grad():
        run = opforge.compile_fx(graph(), [torch.randn(4, 6)])
    with pytest.raises(InputError, match=message):
        run(x)
    with pytest.raises(InputError, match="takes 1 inputs, 2 were given"):
        run(torch.ones(4, 6), torch.ones(4, 6))


def test_a_gradient_that_nobody_asks_for_is_no_other_input() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    with torch.no_grad():
        run = opforge.compile_fx(graph(), [torch.randn(4, 6)])
        torch.testing.assert_close(run(x)[0] if isinstance(run(x), tuple) else run(x), graph()(x))


def test_the_same_kind_of_inputs_is_taken() -> None:
    with torch.no_grad():
        run = opforge.compile_fx(graph(), [torch.randn(1, 6)])
        x = torch.randn(1, 12)[:, ::2].contiguous().as_strided((1, 6), (99, 1))  # a stride that says nothing
        torch.testing.assert_close(run(x)[0] if isinstance(run(x), tuple) else run(x), graph()(x))


def test_ahead_of_time_modules_refuse_too() -> None:
    run = opforge.aot_module_simplified(nn.GELU(), (torch.randn(1000),), fw_compiler=opforge.compile_fx)
    torch.testing.assert_close(run(torch.ones(1000)), nn.GELU()(torch.ones(1000)))
    with pytest.raises(InputError, match=r"has the sizes \[3\]"):
        run(torch.ones(3))


DYNAMIC = {
    "equal sizes": (
        lambda a, b: a + b,
        [(4,), (4,)],
        [(5,), (5,)],
        [(4,), (5,)],
        r"the sizes \[\[4\], \[5\]\] do not meet input\d.shape\[0\] == input\d.shape\[0\]",
    ),
    "a size of one": (
        lambda a, b: a + b,
        [(4,), (4,)],
        [(6,), (6,)],
        [(1,), (1,)],
        r"do not meet input\d.shape\[0\] >= 2",
    ),
    "what is asked while tracing": (
        lambda a, b: torch.diagonal_copy(a, 1, out=b) + 1,
        [(4, 4), (3,)],
        [(7, 3), (2,)],
        [(7, 3), (3,)],
        r"the sizes \[\[7, 3\], \[3\]\] do not meet .*, for which the graph was compiled",
    ),
    "a size that is computed": (
        lambda a, b: a.view(-1, 2) * b[:2],
        [(8,), (4,)],
        [(10,), (4,)],
        [(9,), (4,)],
        "do not meet",
    ),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_sizes_that_contradict_the_trace_are_refused(name: str) -> None:
    """A graph of symbolic sizes wrote eight elements through a view of two: nothing compared equal symbols."""
    f, made, good, bad, message = DYNAMIC[name]
    run = opforge.compile_fx(Direct(f), symbolic([torch.zeros(s) for s in made])[0])
    for sizes in (made, good, made):
        given = [torch.rand(s) for s in sizes]
        torch.testing.assert_close(run(*[t.clone() for t in given]), f(*given))
    given = [torch.rand(s) for s in bad]
    before = [t.clone() for t in given]
    with pytest.raises(InputError, match=message):
        run(*given)
    assert all(map(torch.equal, given, before))


def test_a_graph_that_runs_eagerly_takes_any_sizes() -> None:
    opforge.reset_stats()
    examples = symbolic([torch.ones(4), torch.ones(3)])[0]
    with pytest.warns(UserWarning, match="resized"):  # by eager, while it is traced
        run = opforge.compile_fx(Direct(lambda a, out: torch.add(a, 1, out=out)), examples)
    assert opforge.stats()["fallbacks"]
    torch.testing.assert_close(run(torch.ones(5), torch.ones(5)), torch.full((5,), 2.0))
    torch.testing.assert_close(run(torch.ones(1), torch.ones(1)), torch.full((1,), 2.0))
