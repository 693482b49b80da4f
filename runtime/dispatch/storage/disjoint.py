"""Which inputs must not meet in memory for the graph to be right: every written one, and every other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....generated.schemas import DisjointInfo, InputAliasInfo
from .inputs import Inputs
from .overlap import byte_range


def disjoint_inputs(
    inputs: Inputs, input_info: tuple[InputAliasInfo, ...], number: Callable[[Any], int | str]
) -> tuple[DisjointInfo, ...]:
    """The inputs that `pairs` finds partners among. `number` says a size as source text."""
    found = [
        DisjointInfo(i, 0, info.mutates_data, str(inputs.fakes[i].device), (), info.base, info.static)
        for i, info in enumerate(input_info)
        if info.same_as is None and isinstance(inputs.fakes[i], torch.Tensor) and not _is_empty(inputs, i)
    ]
    kinds: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0])  # members, and written ones among them
    for d in found:
        kinds[d.device, d.base, d.static][0] += 1
        kinds[d.device, d.base, d.static][1] += d.written

    def has_partner(d: DisjointInfo) -> bool:
        for (device, base, static), (members, written) in kinds.items():
            own = (device, base, static) == (d.device, d.base, d.static)
            others = members - own if d.written else written
            if others and device == d.device and not (static and d.static) and (base is None or base != d.base):
                return True
        return False

    distances = _distances(inputs, [d for d in found if has_partner(d)])
    return tuple(
        replace(d, bytes=_span(inputs, d.input, number), distances=distances.get(d.input, ()))
        for d in found
        if has_partner(d)
    )


def pairs(found: Sequence[DisjointInfo]) -> Iterator[tuple[DisjointInfo, DisjointInfo]]:
    """A written input and another that it must not meet, each two once."""
    for a in found:
        for b in found if a.written else ():
            if b is not a and not (b.written and b.input < a.input) and must_not_meet(a, b):
                yield a, b


def must_not_meet(a: DisjointInfo, b: DisjointInfo) -> bool:
    """Of two inputs, one of which is written."""
    return a.device == b.device and not (a.static and b.static) and (a.base is None or a.base != b.base)


class Meeting:
    """Says whether inputs meet in memory that must not: one look at all of them in the order of their addresses."""

    __slots__ = ("addresses", "distances", "found", "spans")

    def __init__(self, found: Sequence[DisjointInfo]) -> None:
        self.found = found
        self.distances = {(d.input, other): n for d in found for other, n in d.distances}
        self.addresses: list[int] = []  # of the last call that was right, and with them `spans`
        self.spans: tuple[int, ...] = ()

    def __call__(self, spans: tuple[int, ...], *tensors: torch.Tensor) -> bool:
        """`spans`: the bytes of each tensor."""
        addresses = [t.data_ptr() for t in tensors]
        if addresses == self.addresses and spans == self.spans:
            return False
        begun: list[int] = []  # that may reach the next one
        for k in sorted(range(len(addresses)), key=addresses.__getitem__):
            begun = [j for j in begun if addresses[k] < addresses[j] + spans[j]]
            if spans[k] > 0 and any(self._meet(j, k, addresses[k] - addresses[j]) for j in begun):
                return True
            begun.append(k)
        self.addresses, self.spans = addresses, spans
        return False

    def _meet(self, j: int, k: int, distance: int) -> bool:
        a, b = self.found[j], self.found[k]
        if not (a.written or b.written) or not must_not_meet(a, b):
            return False
        there, back = self.distances.get((a.input, b.input)), self.distances.get((b.input, a.input))
        return distance != there if there is not None else back is None or -distance != back


def static_storages(inputs: Inputs, input_info: tuple[InputAliasInfo, ...]) -> tuple[tuple[int, int], ...]:
    """Where a parameter or buffer is written: every one, and the first of them that has the same storage. There are many of them, and they
    seldom move: the wrapper checks all pairs of them at once, and only when one has moved.
    """
    static = [i for i, info in enumerate(input_info) if info.static and isinstance(inputs.fakes[i], torch.Tensor)]
    if not any(input_info[i].mutates_data for i in static):
        return ()
    first: dict[int, int] = {}
    return tuple((i, first.setdefault(inputs.fakes[i].untyped_storage()._cdata, i)) for i in static)


class SharedOtherwise:
    """Says whether tensors share storages in another way than `groups`: for each, the number of the first with the same storage."""

    __slots__ = ("addresses", "groups")

    def __init__(self, groups: Sequence[int]) -> None:
        self.groups = list(groups)
        self.addresses: list[int] = []  # of the last call that was right: their sizes do not change

    def __call__(self, *tensors: torch.Tensor) -> bool:
        addresses = [t.data_ptr() for t in tensors]
        if addresses == self.addresses:
            return False
        first: dict[int, int] = {}
        if [first.setdefault(t.untyped_storage()._cdata, k) for k, t in enumerate(tensors)] != self.groups:
            return True
        self.addresses = addresses
        return False


def _is_empty(inputs: Inputs, i: int) -> bool:
    layout = inputs.layouts[i]
    assert layout is not None
    return any(type(n) is int and n == 0 for n in layout.size)


def _span(inputs: Inputs, i: int, number: Callable[[Any], int | str]) -> int | str:
    layout = inputs.layouts[i]
    assert layout is not None
    last = sum(((n - 1) * s for n, s in zip(layout.size, layout.stride, strict=True)), 0)
    return number((last + 1) * layout.dtype.itemsize)


def _distances(inputs: Inputs, found: Sequence[DisjointInfo]) -> dict[int, tuple[tuple[int, int], ...]]:
    """For written inputs: others in the same storage whose rows lie between theirs."""
    storages: dict[int, list[DisjointInfo]] = defaultdict(list)
    for d in found:
        storages[inputs.fakes[d.input].untyped_storage()._cdata].append(d)
    known: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for together in storages.values():
        for a, b in pairs(together):
            mine, other = inputs.layouts[a.input], inputs.layouts[b.input]
            if mine is not None and other is not None and mine.plain and other.plain:
                (lo_a, hi_a), (lo_b, hi_b) = byte_range(mine), byte_range(other)
                if lo_a < hi_b and lo_b < hi_a:
                    known[a.input].append((b.input, lo_b - lo_a))
    return {i: tuple(others) for i, others in known.items()}
