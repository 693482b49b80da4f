"""Which inputs must not meet in memory for the graph to be right: every written one, and every other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...generated.schemas import DisjointInfo, InputAliasInfo
from .inputs import Inputs
from .overlap import byte_range


def disjoint_pairs(
    inputs: Inputs, input_info: tuple[InputAliasInfo, ...], number: Callable[[Any], int | str]
) -> tuple[DisjointInfo, ...]:
    """The pairs that the wrapper checks. `number` says a size as source text. Merged inputs need no check against each other."""
    out: list[DisjointInfo] = []
    for i, info in enumerate(input_info):
        if not info.mutates_data:
            continue
        for j, other in enumerate(input_info):
            if not isinstance(inputs.fakes[j], torch.Tensor) or j == i or other.same_as is not None:
                continue
            if (
                (info.base is not None and info.base == other.base)
                or (other.mutates_data and j < i)
                or (info.static and other.static)
            ):
                continue
            if inputs.fakes[i].device != inputs.fakes[j].device:
                continue
            found = _pair(inputs, i, j, number)
            if found is not None:
                out.append(found)
    return tuple(out)


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


def _pair(inputs: Inputs, i: int, j: int, number: Callable[[Any], int | str]) -> DisjointInfo | None:
    a, b = inputs.layouts[i], inputs.layouts[j]
    assert a is not None
    assert b is not None
    spans = []
    for layout in (a, b):
        if any(type(n) is int and n == 0 for n in layout.size):
            return None
        last = sum(((n - 1) * s for n, s in zip(layout.size, layout.stride, strict=True)), 0)
        spans.append(number((last + 1) * layout.dtype.itemsize))
    distance = None
    same = inputs.fakes[i].untyped_storage()._cdata == inputs.fakes[j].untyped_storage()._cdata
    if same and a.plain and b.plain:
        (lo_a, hi_a), (lo_b, hi_b) = byte_range(a), byte_range(b)
        distance = lo_b - lo_a if lo_a < hi_b and lo_b < hi_a else None
    return DisjointInfo(i, j, spans[0], spans[1], distance)
