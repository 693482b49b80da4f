"""Do two tensors of one storage share an element? Decided on their layouts, exactly where programs need it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from ...ir.facts import is_packed
from ...torch_compat import known, size_hint
from .regions import Layout, expressions

_UNKNOWN = -1
"""A size that data makes."""


def byte_range(layout: Layout) -> tuple[int, int]:
    """First byte and the byte past the last that a layout with known, non-negative strides and at least one element
    touches.
    """
    size = layout.dtype.itemsize
    last = sum((n - 1) * s for n, s in zip(layout.size, layout.stride, strict=True))
    return layout.offset * size, (layout.offset + last + 1) * size


def inside(part: Layout, whole: Layout) -> bool:
    """Whether `part` touches no byte outside of the range of `whole` (both with known sizes); what is empty has none."""
    if not (part.plain and whole.plain):
        return False
    if math.prod(part.size) == 0 or math.prod(whole.size) == 0:
        return math.prod(part.size) == 0
    (lo, hi), (first, end) = byte_range(part), byte_range(whole)
    return first <= lo and hi <= end


def begins_inside(part: Layout, whole: Layout) -> bool:
    """Whether the first element of `part` is known not to be that of `whole`, in one storage."""
    first = (layout.offset * layout.dtype.itemsize for layout in (part, whole))
    return len(set(expressions(tuple(first)))) > 1


def covers(whole: Layout, part: Layout) -> bool:
    """Whether `whole` has every element that `part` names, as far as their known sizes and strides say."""
    if whole.key() == part.key():
        return True
    if not whole.plain or not part.plain:
        return False
    # Elements of expanded dimensions are the same ones again.
    dims = [(n, s) for n, s in zip(whole.size, whole.stride, strict=True) if s != 0]
    once = replace(whole, size=tuple(n for n, _ in dims), stride=tuple(s for _, s in dims))
    return is_dense(once) and inside(part, once)


def can_view(layout: Layout, shape: Sequence[Any]) -> bool:
    """Whether a tensor can be seen in another shape of as many elements (-1: what remains) without a copy, as far as numbers say."""
    if not layout.plain or any(type(n) is not int for n in shape) or 0 in layout.size:
        return True
    runs: list[int] = []  # sizes of dimensions that lie together as one, from the last
    end = None
    for n, s in zip(reversed(layout.size), reversed(layout.stride), strict=True):
        if n == 1:
            continue
        if s == end:
            runs[-1] *= n
        else:
            runs.append(n)
        end = n * s
    known = math.prod(n for n in shape if n != -1)
    wanted = [math.prod(layout.size) // max(1, known) if n == -1 else n for n in shape]
    if math.prod(wanted) != math.prod(layout.size):
        return True  # an error of another kind
    for run in runs:
        part = 1
        while part < run:
            part *= wanted.pop()
        if part != run:
            return False
    return True


def overlaps_itself(layout: Layout) -> bool:
    """Whether two index tuples may name the same element (an expanded tensor, an overlapping `as_strided`); symbolic sizes and strides count
    as what they were in the example inputs.
    """
    pairs = list(zip(layout.size, layout.stride, strict=True))
    if not layout.plain:
        if any(type(s) is int and s == 0 and not (type(n) is int and n <= 1) for n, s in pairs):
            return True
        pairs = [(size_hint(n, _UNKNOWN), size_hint(s, _UNKNOWN)) for n, s in pairs]
        if any(_UNKNOWN in pair for pair in pairs):
            return False
    reach = 0
    for n, s in sorted(((n, s) for n, s in pairs if n > 1), key=lambda p: p[1]):
        if s <= reach:
            return True
        reach += (n - 1) * s
    return False


def is_dense(layout: Layout) -> bool:
    """Whether the elements fill their range without gaps or overlap, so that a copy can have the same strides and
    nothing else.
    """
    if not layout.plain:
        return is_packed(expressions(layout.size), expressions(layout.stride))
    expected = 1
    for n, s in sorted(
        ((n, s) for n, s in zip(layout.size, layout.stride, strict=True) if n != 1), key=lambda p: (p[1], p[0])
    ):
        if s != expected and n != 0:
            return any(k == 0 for k in layout.size)
        expected *= n
    return True


def is_row_major(layout: Layout) -> bool:
    """Whether the elements lie one after the other, the last dimension fastest; decided on expressions only."""
    sizes = expressions(layout.size)
    expected: Any = 1
    for n, s in zip(reversed(sizes), reversed(expressions(layout.stride)), strict=True):
        if s != expected and n != 1:
            return 0 in sizes
        expected = expected * n
    return True


def may_overlap(a: Layout, b: Layout) -> bool:
    """Whether two layouts of one storage may share a byte, for some of the sizes that their symbols stand for."""
    if not (a.plain and b.plain):
        return not _are_apart(a, b)
    if math.prod(a.size) == 0 or math.prod(b.size) == 0:
        return False
    (lo_a, hi_a), (lo_b, hi_b) = byte_range(a), byte_range(b)
    if hi_a <= lo_b or hi_b <= lo_a:
        return False
    if a.dtype.itemsize != b.dtype.itemsize:
        return True
    return _boxes_meet(a, b)


def _are_apart(a: Layout, b: Layout) -> bool:
    """Whether two boxes of one grid of symbolic size, of which one lies further along one dimension, are known to share no element."""
    strides = expressions(a.stride)
    if a.dtype is not b.dtype or strides != expressions(b.stride) or not strides:
        return False
    symbol = next(
        v for v in (*a.size, *a.stride, a.offset, *b.size, *b.stride, b.offset) if isinstance(v, torch.SymInt)
    )
    env = symbol.node.shape_env

    def is_none_or_more(e: Any) -> bool:
        return known(env.create_symboolnode(sympy.Ge(sympy.expand(e), 0)))

    ((start_a, start_b), sizes_a, sizes_b) = (expressions(v) for v in ((a.offset, b.offset), a.size, b.size))
    if size_hint(b.offset, _UNKNOWN) < size_hint(a.offset, _UNKNOWN):
        start_a, start_b, sizes_a, sizes_b = start_b, start_a, sizes_b, sizes_a
    order = sorted(range(len(strides)), key=lambda k: -size_hint(a.stride[k], _UNKNOWN))
    for d in order:
        steps = sympy.cancel((start_b - start_a) / strides[d]) if strides[d] != 0 else None
        if steps is None or sympy.fraction(steps)[1] != 1 or not is_none_or_more(steps - sizes_a[d]):
            continue
        if not is_none_or_more(strides[d] - 1):  # a symbol that may be 0 takes both to one place
            continue
        # The box around both: where each of its rows ends before the next one begins, no two of its elements are one.
        ends = [(n, m + steps if k == d else m) for k, (n, m) in enumerate(zip(sizes_a, sizes_b, strict=True))]
        rows = itertools.pairwise(order)
        if all(is_none_or_more(strides[k] - n * strides[inner]) for k, inner in rows for n in ends[inner]):
            return True
    return False


def _boxes_meet(a: Layout, b: Layout) -> bool:
    """Two boxes of one grid (columns or blocks of one matrix) are compared dimension by dimension; other pairs count
    as meeting.
    """
    strides = sorted(
        {s for layout in (a, b) for n, s in zip(layout.size, layout.stride, strict=True) if n > 1} | {1}, reverse=True
    )
    if any(s <= 0 for s in strides) or any(big % small for big, small in itertools.pairwise(strides)):
        return True
    starts = [_digits(layout.offset, strides) for layout in (a, b)]
    lengths = [_lengths(layout, strides) for layout in (a, b)]
    for k in range(1, len(strides)):
        period = strides[k - 1] // strides[k]
        if any(start[k] + length[k] > period for start, length in zip(starts, lengths, strict=True)):
            return True  # a box that wraps into the next row is no box of this grid
    spans = zip(*starts, *lengths, strict=True)
    return all(start_a < start_b + n_b and start_b < start_a + n_a for start_a, start_b, n_a, n_b in spans)


def _digits(offset: int, strides: Sequence[int]) -> list[int]:
    out = []
    for s in strides:
        out.append(offset // s)
        offset %= s
    return out


def _lengths(layout: Layout, strides: Sequence[int]) -> list[int]:
    out = [1] * len(strides)
    for n, s in zip(layout.size, layout.stride, strict=True):
        if n > 1:
            k = strides.index(s)
            out[k] += n - 1
    return out
