"""The backward for a call in which some results got no gradient."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from ...generated.dispatch_tables import ROLES
from ..dispatch.operators.effects import must_run
from ..torch_compat import LazyGraphModule


def without_tangents(
    backward: fx.GraphModule, undefined: Collection[int], unreached: Collection[int]
) -> fx.GraphModule:
    """A copy of `backward` that returns None for the gradients at `unreached`, and adds nothing that comes from the tangents at `undefined`
    alone to another gradient: in eager that does not exist, and computing it from zeros would not do, for zero times infinity is not zero. Where it
    is put together with others (those of the parts of a tensor) it is zeros, and so is a gradient of which nothing else is left. All
    placeholders stay; what else needs an undefined tangent takes zeros for it.
    """
    graph = fx.Graph()
    results = graph.graph_copy(backward.graph, {})
    assert isinstance(results, (tuple, list))
    tangents = [n for n in graph.nodes if n.op == "placeholder" and n.meta.get("tangent")]
    gone = {n for k, n in enumerate(tangents) if k in undefined}
    from_tangents = set(tangents)
    returned = list(results)
    for node in list(graph.nodes):
        used = [n for n in node.all_input_nodes if n in from_tangents]
        if not used:
            continue
        from_tangents.add(node)
        if node.target is ROLES["add"] and len(node.args) == 2 and not node.kwargs:
            # A term that no tangent comes to counts: autograd makes it for a power of 0, for one.
            rest = [n for n in node.args if n not in gone]
            if len(rest) == 1 and isinstance(rest[0], fx.Node):
                if _alike(rest[0], node):
                    node.replace_all_uses_with(rest[0])
                    returned = [rest[0] if r is node else r for r in returned]
                else:
                    _give_zeros(graph, node, gone)
                continue
        if all(n in gone for n in used):
            gone.add(node)
        elif any(n in gone for a in node.args if isinstance(a, (list, tuple)) for n in a if isinstance(n, fx.Node)):
            _give_zeros(graph, node, gone)
    for k, r in enumerate(returned):
        if r in gone and k not in unreached:
            returned[k] = _zeros(graph, r)
    graph.output(tuple(None if k in unreached else r for k, r in enumerate(returned)))
    _eliminate_dead(graph)
    return LazyGraphModule(backward, graph, class_name="Backward")


def without_gradients(backward: fx.GraphModule, left: Collection[int]) -> fx.GraphModule:
    """A copy of `backward` that returns None for the gradients at `left`."""
    graph = fx.Graph()
    results = graph.graph_copy(backward.graph, {})
    assert isinstance(results, (tuple, list))
    graph.output(tuple(None if k in left else r for k, r in enumerate(results)))
    _eliminate_dead(graph)
    return LazyGraphModule(backward, graph, class_name="Backward")


def _eliminate_dead(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and not must_run(node.target):
            graph.erase_node(node)


def _give_zeros(graph: fx.Graph, node: fx.Node, gone: Collection[fx.Node]) -> None:
    for n in node.all_input_nodes:
        if n in gone:
            with graph.inserting_before(node):
                node.replace_input_with(n, _zeros(graph, n))


def _zeros(graph: fx.Graph, like: fx.Node) -> fx.Node:
    """Zeros of the sizes of `like`, row-major."""
    val = like.meta["val"]
    made = graph.call_function(ROLES["zeros"], (list(val.shape), 0), {"dtype": val.dtype, "device": val.device})
    made.meta = {**like.meta, "val": val.new_zeros(val.shape)}
    return made


def tangents_with(backward: fx.GraphModule) -> tuple[int, ...]:
    """For each placeholder of `backward` that is no tangent those tangents, as bits, from which and it something is computed."""
    needed = needed_for(backward)
    return tuple(needed[n] for n in backward.graph.nodes if n.op == "placeholder" and not n.meta.get("tangent"))


def needed_for(backward: fx.GraphModule) -> dict[fx.Node, int]:
    """For what is computed without tangents, and what for: the tangents, as bits, from which and it something is computed."""
    placeholders = [n for n in backward.graph.nodes if n.op == "placeholder"]
    tangents = [n for n in placeholders if n.meta.get("tangent")]
    above: dict[fx.Node, int] = {n: 1 << k for k, n in enumerate(tangents)}
    for node in backward.graph.nodes:
        if node.op == "call_function":
            above[node] = 0
            for n in node.all_input_nodes:
                above[node] |= above.get(n, 0)
    meets: dict[fx.Node, int] = {}
    for node in reversed(backward.graph.nodes):
        found = 0
        for user in node.users:  # what no tangent comes to, and is returned, every call computes
            found |= -1 if user.op == "output" else above[user] or meets[user]
        meets[node] = found
    return {n: meets[n] for n in backward.graph.nodes if n.op != "output" and not above.get(n, 0)}


def _alike(a: object, b: fx.Node) -> bool:
    if not isinstance(a, fx.Node):
        return False
    x, y = a.meta["val"], b.meta["val"]
    return (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
