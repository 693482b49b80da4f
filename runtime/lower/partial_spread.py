"""Sums of squares about a mean, cut into parts as the mean's own sum is: each part about its own mean, so that it is made with the part of the
mean while the data is at hand, and not by reading all of it once more (Chan, Golub and LeVeque 1979).

The sum about the mean of all is that of the parts about theirs, and of how far those are from it, each times the number of its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir.index import product
from ..ir.nodes import Nest, Node, const, identity_mapping, load, rebuild
from . import scalar_ops


def spread(
    nest: Nest, made: Mapping[str, Nest], cut: Mapping[str, tuple[Nest, list[Nest]]], name: str
) -> list[Nest] | None:
    """The parts of a sum of squared distances from a mean, and their total; None for another reduction. `made`: nests so far. `cut`: of
    those, sums with their parts and total. `name`: of the parts.
    """
    if nest.reduce != "sum":
        return None
    square = _value(nest.body, made)
    if square.op != "mul" or square.args[0] is not square.args[1]:
        return None
    distance = _value(square.args[0], made)
    if distance.op != "sub" or distance.dtype != nest.dtype:
        return None
    value, mean = distance.args
    whole = _value(mean, made)
    n = product(v.extent for v in nest.rvars)
    if whole.op != "div" or whole.args[0].op != "load" or whole.args[1].op != "const" or whole.args[1].attr != n:
        return None
    total = whole.args[0]
    if total.attr.buffer not in cut or total.attr.index != nest.vars or total.args:
        return None
    first, (parts, sums) = cut[total.attr.buffer]
    if first.reduce != "sum" or first.dtype != nest.dtype or first.vars != nest.vars or first.rvars != nest.rvars:
        return None
    if first.body is not value:
        return None
    at = parts.vars
    one = product(v.extent for v in parts.rvars)
    assert isinstance(one, int)
    here = scalar_ops.div(load(parts.name, at, nest.dtype), const(one, nest.dtype))
    apart = scalar_ops.sub(parts.body, here)
    off = scalar_ops.sub(here, whole)
    count = const(one, nest.dtype)
    both = scalar_ops.add(load(name, at, nest.dtype), scalar_ops.mul(count, scalar_ops.mul(off, off)))
    return [
        replace(parts, name=name, body=scalar_ops.mul(apart, apart), origin=nest.origin),
        replace(nest, body=both, rvars=sums.rvars),
    ]


def _value(node: Node, made: Mapping[str, Nest]) -> Node:
    """What is loaded where that is a value of a nest of independent points, and so on."""
    while node.op == "load" and not node.args and (nest := made.get(node.attr.buffer)) is not None:
        if nest.rvars or nest.reduce is not None or nest.scan is not None or nest.scatter is not None:
            break
        if node.attr.index == nest.vars:
            node = nest.body
            continue
        node = rebuild(nest.body, lambda _: None, identity_mapping(nest.vars, node.attr.index))
    return node


__all__ = ["spread"]
