"""Which inputs must not meet in memory for the graph to be right: every written one, and every other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...generated.schemas import DisjointInfo, InputAliasInfo
from .inputs import Inputs
from .overlap import byte_range


def disjoint_pairs(
    inputs: Inputs, input_info: tuple[InputAliasInfo, ...], number: Callable[[Any], int | str]
) -> list[DisjointInfo]:
    """The pairs that the wrapper checks. `number` says a size as source text. Merged inputs need no check against each other."""
    out = []
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
    return out


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
