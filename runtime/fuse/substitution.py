"""Substitute the bodies of values for the loads that read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..ir.fold import fold
from ..ir.guards import masked
from ..ir.index import Expr, Val, expr, proves_less, proves_nonnegative
from ..ir.nodes import Buffer, Nest, Node, Scatter, identity_mapping, indirect, rebuild


class Inliner:
    """Holds the bodies that are substituted away; each (producer, index) pair is expanded once."""

    def __init__(self, shapes: Mapping[str, Buffer]) -> None:
        self.shapes = shapes
        self.bodies: dict[str, Nest] = {}
        self.cache: dict[tuple[str, tuple[Expr, ...]], Node] = {}
        self.folded: dict[Node, Node] = {}

    def expand(self, ld: Node) -> Node | None:
        nest = self.bodies.get(ld.attr.buffer)
        if nest is None:
            return None
        if ld.attr.index == nest.vars:
            node: Node | None = nest.body  # the very point: nothing to rename, however long the body has become
        else:
            key = (nest.name, ld.attr.index)
            node = self.cache.get(key)
            if node is None:
                node = rebuild(nest.body, _keep, identity_mapping(nest.vars, ld.attr.index))
                self.cache[key] = node
        assert node is not None
        if not ld.args:
            return node
        # A row's sum beside the padding of its elements, rows that are padded in memory: a mask would cost more than the memory that it spares.
        return masked(node, ld.args[0], {x for x in node.loads() if _there(x, self.shapes)})

    def apply(self, nest: Nest) -> Nest:
        """The nest with every load of a substituted buffer expanded."""
        if not any(name in self.bodies for name in nest.reads()):
            return nest
        memo: dict[Node, Node] = {}
        # What was data (positions made by a range) may have become coordinates: comparisons of those are decided here.
        body = fold(rebuild(nest.body, self.expand, {}, memo), self.folded)
        scatter = nest.scatter
        if scatter is not None:
            scatter = map_scatter(scatter, lambda n: fold(rebuild(n, self.expand, {}, memo), self.folded))
        return replace(nest, body=body, scatter=scatter)


def _there(ld: Node, shapes: Mapping[str, Buffer]) -> bool:
    """Whether the load, at coordinates, stays inside of its buffer at every point of the loops."""
    if ld.args or any(isinstance(a, Val) for e in ld.attr.index for a in e.atoms()):
        return False
    sizes = shapes[ld.attr.buffer].shape
    return all(proves_nonnegative(e) and proves_less(e, expr(n)) for e, n in zip(ld.attr.index, sizes, strict=True))


def map_scatter(scatter: Scatter, on_node: Callable[[Node], Node]) -> Scatter:
    """Rewrite the nodes inside an indexed update (its indirect indices and its mask)."""

    def on_value(v: Val) -> Expr:
        return indirect(on_node(v.node), v.lo, v.hi)

    index = tuple(e.subst({}, on_value) for e in scatter.index)
    return replace(scatter, index=index, mask=None if scatter.mask is None else on_node(scatter.mask))


def _keep(_: Node) -> None:
    return None
