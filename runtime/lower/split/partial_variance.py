"""Parallel variance (Chan, Golub and LeVeque 1979): sums of distances from a mean, and of their squares, cut into parts as the mean's own sum is.
Each part is about its own mean, so it is computed together with its part of the mean, without reading all data once more.

Of a part with n values about its mean c, `off` from the mean of all, whose distances from c have the sum r (what the rounding of c leaves) and
the squares q:

    sum(x - mean) = r + n off        sum((x - mean)^2) = q + off (2 r + n off)

Where nothing asks for the sum of distances, r counts as 0.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.index import product
from ...ir.nodes import Nest, Node, Program, const, identity_mapping, load, rebuild
from ..language import scalar_ops

Key = tuple[Node, tuple[object, ...], tuple[object, ...]]
"""A distance, for the points that are reduced to others."""


class ParallelVariance:
    """Finds such sums among the reductions of a program. Call `parallel` for each reduction that is cut, in order, and `note` for all others.
    `names` are taken.
    """

    def __init__(self, program: Program, names: set[str]) -> None:
        self.names = names
        self.made = {item.name: item for item in program.items if isinstance(item, Nest)}
        self.cut: dict[str, tuple[Nest, list[Nest]]] = {}  # sums, with their parts and total
        sums = [(nest, self.value(nest.body)) for nest in self.made.values() if nest.reduce == "sum"]
        self.distances = {_key(nest, value): nest for nest, value in sums if value.op == "sub"}
        self.parts: dict[Key, Nest] = {}  # of sums of distances

    def note(self, nest: Nest, parts: list[Nest]) -> None:
        """`nest` has become these: its parts, and their total."""
        self.cut[nest.name] = nest, parts

    def parallel(self, nest: Nest, name: str) -> list[Nest] | None:
        """The nests that a reduction becomes if it is such a sum; None for another one. `name`: of its parts."""
        if nest.reduce != "sum":
            return None
        value = self.value(nest.body)
        if value.op == "sub":
            return self.of_distances(nest, name, value)
        if value.op != "mul" or (distance := self.value(value.args[0])) is not self.value(value.args[1]):
            return None
        return self.of_squares(nest, name, distance)

    def of_distances(self, nest: Nest, name: str, distance: Node) -> list[Nest] | None:
        if (about := self.about(nest, distance)) is None:
            return None
        parts, mean, sums = about
        found = self.parts.get(_key(nest, distance))
        before = [] if found is not None else [self.distances_in(nest, name, distance, parts)]
        one, off = _ends(parts, mean, nest)
        rest = load(self.parts[_key(nest, distance)].name, parts.vars, nest.dtype)
        total = scalar_ops.add(rest, scalar_ops.mul(one, off))
        return [*before, replace(nest, body=total, rvars=sums.rvars)]

    def of_squares(self, nest: Nest, name: str, distance: Node) -> list[Nest] | None:
        if (about := self.about(nest, distance)) is None:
            return None
        parts, mean, sums = about
        apart = scalar_ops.sub(parts.body, _mean_of(parts, nest))
        made = [replace(parts, name=name, body=scalar_ops.mul(apart, apart), origin=nest.origin)]
        one, off = _ends(parts, mean, nest)
        beyond = scalar_ops.mul(one, off)
        key = _key(nest, distance)
        if (sum_of_distances := self.distances.get(key)) is not None:
            if key not in self.parts:
                made.append(self.distances_in(sum_of_distances, fresh(f"{name}_apart", self.names), distance, parts))
            rest = load(self.parts[key].name, parts.vars, nest.dtype)
            beyond = scalar_ops.add(scalar_ops.add(rest, rest), beyond)
        total = scalar_ops.add(load(name, parts.vars, nest.dtype), scalar_ops.mul(off, beyond))
        return [*made, replace(nest, body=total, rvars=sums.rvars)]

    def distances_in(self, nest: Nest, name: str, distance: Node, parts: Nest) -> Nest:
        """The parts of a sum of distances."""
        apart = scalar_ops.sub(parts.body, _mean_of(parts, nest))
        made = self.parts[_key(nest, distance)] = replace(parts, name=name, body=apart, origin=nest.origin)
        return made

    def about(self, nest: Nest, distance: Node) -> tuple[Nest, Node, Nest] | None:
        """The parts of the sum of what is as far from a mean as `distance`, the mean of all, and the sum of the parts; None where that is not
        the mean of what `nest` goes through.
        """
        if distance.op != "sub" or distance.dtype != nest.dtype:
            return None
        value, mean = distance.args
        whole = self.value(mean)
        n = product(v.extent for v in nest.rvars)
        if whole.op != "div" or whole.args[0].op != "load" or whole.args[1].op != "const" or whole.args[1].attr != n:
            return None
        total = whole.args[0]
        if total.attr.buffer not in self.cut or total.attr.index != nest.vars or total.args:
            return None
        first, (parts, sums) = self.cut[total.attr.buffer]
        if first.reduce != "sum" or first.dtype != nest.dtype or first.vars != nest.vars or first.rvars != nest.rvars:
            return None
        return (parts, whole, sums) if first.body is value else None

    def value(self, node: Node) -> Node:
        """What is loaded where that is a value of a nest of independent points, and so on."""
        while node.op == "load" and not node.args and (nest := self.made.get(node.attr.buffer)) is not None:
            if nest.rvars or nest.reduce is not None or nest.scan is not None or nest.scatter is not None:
                break
            if node.attr.index == nest.vars:
                node = nest.body
                continue
            node = rebuild(nest.body, lambda _: None, identity_mapping(nest.vars, node.attr.index))
        return node


def _key(nest: Nest, distance: Node) -> Key:
    return distance, nest.vars, nest.rvars


def _mean_of(parts: Nest, nest: Nest) -> Node:
    count = product(v.extent for v in parts.rvars)
    assert isinstance(count, int)
    return scalar_ops.div(load(parts.name, parts.vars, nest.dtype), const(count, nest.dtype))


def _ends(parts: Nest, mean: Node, nest: Nest) -> tuple[Node, Node]:
    """How many values a part has, and how far its mean is from the mean of all."""
    count = product(v.extent for v in parts.rvars)
    assert isinstance(count, int)
    return const(count, nest.dtype), scalar_ops.sub(_mean_of(parts, nest), mean)


def fresh(name: str, names: set[str]) -> str:
    """A name that is none of `names`, which has it then."""
    while name in names:
        name += "_"
    names.add(name)
    return name


__all__ = ["ParallelVariance", "fresh"]
