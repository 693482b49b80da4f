"""Moves the nodes of a captured backward."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx


def reorder(graph: fx.Graph, group: Mapping[fx.Node, int], sums: Collection[fx.Node], order: Sequence[int]) -> None:
    """Put the groups of nodes into an `order` that is topological for them. What belongs to no group in it stays in front. Each of the `sums` adds
    two gradients of one result as they arrive: they are added anew in the order in which they arrive now.
    """
    place = {number: k for k, number in enumerate(order)}
    members: dict[int, list[fx.Node]] = {number: [] for number in order}
    for node in graph.nodes:
        if node not in sums and group.get(node) in place:
            members[group[node]].append(node)
    for chain, terms in _chains(sums):
        arrived = sorted(terms, key=lambda term: place.get(group.get(term, -1), -1))
        total = arrived[0]
        for node, term in zip(chain, arrived[1:], strict=True):
            node.args = (total, term)
            members[group[term] if group.get(term) in place else order[0]].append(node)
            total = node
    front = (n for n in reversed(graph.nodes) if n.op != "output" and n not in sums and group.get(n) not in place)
    last = next(front)
    for number in order:
        for node in members[number]:
            last.append(node)
            last = node


def _chains(sums: Collection[fx.Node]) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """For each total the sums that it is made by, itself last, and the terms."""
    inner = {a for s in sums for a in _terms(s) if a in sums}
    found = []
    for total in sums:
        if total in inner:
            continue
        chain, terms, work = [], list[fx.Node](), [total]
        while work:
            node = work.pop()
            if node in sums:
                chain.append(node)
                work += reversed(_terms(node))
            else:
                terms.append(node)
        found.append((chain[::-1], terms))
    return found


def _terms(total: fx.Node) -> tuple[fx.Node, fx.Node]:
    first, second = total.args
    assert isinstance(first, fx.Node)
    assert isinstance(second, fx.Node)
    return first, second
