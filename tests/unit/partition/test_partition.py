"""The two halves together are the joint graph; how much is kept between them."""

import copy
import operator
from typing import Any

import pytest
import torch
from torch import fx

from opforge.runtime.partition import Partition, partition
from tests.unit.partition.joint import joint_graph
from tests.unit.partition.models import MODELS


def run(p: Partition, primals: list[Any], tangents: list[Any], outputs: int) -> tuple[list[Any], list[Any]]:
    """Forward, then backward, each node by node."""
    results = list(p.forward(*primals))
    return results[:outputs], list(p.backward(*results[outputs:], *tangents))


def inputs_of(joint: fx.GraphModule, args: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """Arguments (primals, tangents) with the shapes that the joint graph was made for."""
    places = [n for n in joint.graph.nodes if n.op == "placeholder"]
    tangents = [
        torch.randn([int(s) for s in n.meta["val"].shape], dtype=n.meta["val"].dtype) for n in places[len(args) :]
    ]
    return [a.detach() for a in args], tangents


def assert_same(mine: Any, theirs: Any) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        if b is None:
            assert a is None
        else:
            assert torch.equal(a, b)
            assert a.stride() == b.stride()


def check_form(p: Partition, primals: int, outputs: int) -> None:
    """Placeholders, names, and that no two saved tensors share memory."""
    p.forward.graph.lint()
    p.backward.graph.lint()
    results = next(n for n in reversed(p.forward.graph.nodes) if n.op == "output").args[0]
    assert tuple(n.name for n in results[outputs:]) == p.saved
    places = [n.name for n in p.backward.graph.nodes if n.op == "placeholder"]
    assert tuple(places[: len(p.saved)]) == p.saved
    assert p.saved_tensors + p.saved_symbols == len(p.saved) == len(p.origins)
    assert len([n for n in p.forward.graph.nodes if n.op == "placeholder"]) == primals


@pytest.mark.parametrize("budget", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("policy", ["default", "min_cut"])
@pytest.mark.parametrize("name", MODELS)
def test_halves_equal_the_joint_graph(name: str, policy: Any, budget: float) -> None:
    function, args = MODELS[name]()
    joint, primals, outputs = joint_graph(function, args)
    p = partition(joint, primals, outputs, policy=policy, budget=budget)
    check_form(p, primals, outputs)
    flat, tangents = inputs_of(joint, args)
    torch.manual_seed(0)
    outs, grads = joint(*flat, *tangents)
    torch.manual_seed(0)
    mine, my_grads = run(p, flat, tangents, outputs)
    assert_same(mine, outs)
    assert_same(my_grads, grads)


@pytest.mark.parametrize("name", [n for n in MODELS if n not in ("attention",)])
def test_dynamic_shapes(name: str) -> None:
    function, args = MODELS[name]()
    joint, primals, outputs = joint_graph(function, args, dynamic=True)
    p = partition(joint, primals, outputs)
    check_form(p, primals, outputs)
    flat, tangents = inputs_of(joint, args)
    torch.manual_seed(0)
    outs, grads = joint(*flat, *tangents)
    torch.manual_seed(0)
    mine, my_grads = run(p, flat, tangents, outputs)
    assert_same(mine, outs)
    assert_same(my_grads, grads)


def peer_bytes(joint: fx.GraphModule, primals: int, outputs: int) -> int:
    """Bytes that torch's own partitioner keeps beside inputs and outputs, on the same graph."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    theirs = copy.deepcopy(joint)
    end = next(n for n in reversed(theirs.graph.nodes) if n.op == "output")
    outs, grads = end.args[0]
    end.args = ((*outs, *grads),)
    for node in theirs.graph.nodes:
        if node.op == "placeholder":
            node.target = node.name = f"tangents_{node.name}" if node.meta.get("tangent") else f"primals_{node.name}"
        elif node.meta.get("backward"):
            node.meta["partitioner_tag"] = "is_backward"
    theirs.recompile()
    forward, _ = min_cut_rematerialization_partition(
        theirs, [n.meta["val"] for n in theirs.graph.nodes if n.op == "placeholder"], num_fwd_outputs=outputs
    )
    results = next(n for n in reversed(forward.graph.nodes) if n.op == "output").args[0]
    given = {base_of(n) for n in results[:outputs]}
    own = {base_of(n) for n in results[outputs:] if isinstance(n.meta["val"], torch.Tensor)}
    return sum(n.meta["val"].untyped_storage().nbytes() for n in own - given if n.op != "placeholder")


def base_of(node: fx.Node) -> fx.Node:
    """What a node is a view of in the end."""
    while (
        (
            isinstance(node.target, torch._ops.OpOverload)
            and any(r.alias_info is not None for r in node.target._schema.returns)
        )
        or node.target is torch.ops.aten._unsafe_view.default
        or (node.target is operator.getitem and base_of(node.args[0]) is not node.args[0])
    ):
        node = node.all_input_nodes[0]
    return node


@pytest.mark.parametrize("name", MODELS)
def test_no_more_bytes_than_the_peer(name: str) -> None:
    function, args = MODELS[name]()
    joint, primals, outputs = joint_graph(function, args)
    theirs = peer_bytes(joint, primals, outputs)
    mine = partition(joint, primals, outputs).saved_bytes
    print(name, mine, theirs)
    assert mine <= 1.05 * theirs
