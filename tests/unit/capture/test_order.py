"""Captured backwards in eager's order."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from opforge.runtime.capture.eager_order import Walk, eager_order
from opforge.runtime.capture.reorder import reorder


def names(nodes: list[object]) -> list[str]:
    return [n.name() for n in nodes]  # type: ignore[attr-defined]


def test_a_later_branch_runs_first() -> None:
    """The engine captures from a stack, and runs what was made last."""
    x = torch.randn(3, requires_grad=True)
    early, late = x.sin(), x.cos()
    walk = Walk([late * early], [])
    assert names(walk.captured())[1:3] == ["SinBackward0", "CosBackward0"]
    assert names(walk.eager())[1:3] == ["CosBackward0", "SinBackward0"]


def test_only_what_leads_to_the_inputs_runs() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    out = x.sin() * y.cos()
    assert names(Walk([out], [x]).eager()) == ["MulBackward0", "SinBackward0", "torch::autograd::AccumulateGrad"]


def test_an_order_that_is_not_known() -> None:
    out = torch.randn(3, requires_grad=True).sin()
    captured = ["SinBackward0", "torch::autograd::AccumulateGrad"]
    assert eager_order([out], [], captured) == [0, 1]
    assert eager_order([out], [], ["CosBackward0", captured[1]]) is None


def captured_graph() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """x goes to three groups, whose results are added as they come."""
    graph = fx.Graph()
    nodes = {"x": graph.placeholder("x")}
    for name in "abc":
        nodes[name] = graph.call_function(operator.neg, (nodes["x"],))
    nodes["ab"] = graph.call_function(torch.add, (nodes["a"], nodes["b"]))
    nodes["abc"] = graph.call_function(torch.add, (nodes["ab"], nodes["c"]))
    nodes["end"] = graph.call_function(operator.pos, (nodes["abc"],))
    return graph, nodes


@pytest.mark.parametrize("order", [[1, 2, 3], [3, 1, 2], [2, 3, 1]])
def test_sums_are_made_as_their_terms_arrive(order: list[int]) -> None:
    graph, nodes = captured_graph()
    group = {nodes[name]: number for number, name in enumerate("abc", 1)} | {nodes["end"]: 4}
    reorder(graph, group, {nodes["ab"]: None, nodes["abc"]: None}, [0, *order, 4])
    graph.lint()
    first, second, third = (nodes["_abc"[number]] for number in order)
    assert nodes["ab"].args == (first, second)
    assert nodes["abc"].args == (nodes["ab"], third)
    assert list(graph.nodes) == [nodes["x"], first, second, nodes["ab"], third, nodes["abc"], nodes["end"]]


def test_a_gradient_that_is_added_to_itself() -> None:
    graph, nodes = captured_graph()
    nodes["ab"].args = (nodes["a"], nodes["a"])
    group = {nodes["a"]: 1, nodes["c"]: 2, nodes["end"]: 3}
    reorder(graph, group, {nodes["ab"]: None, nodes["abc"]: None}, [0, 2, 1, 3])
    graph.lint()
    assert nodes["abc"].args == (nodes["ab"], nodes["a"])
    assert nodes["ab"].args == (nodes["c"], nodes["a"])
