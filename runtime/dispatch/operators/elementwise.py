"""The strides that torch's elementwise kernels give their results: those of `TensorIterator`, dimensions of size 1 included.

Torch's fake kernels in Python compute them in another way, which is right but for dimensions of size 1 and for operands that are converted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...torch_compat import known, size_hint
from ..storage.overlap import is_dense
from ..storage.regions import Layout, expressions

Strides = tuple[Any, ...]


class Operand(NamedTuple):
    """Sizes and strides, integers or symbols; a number is an operand without dimensions."""

    shape: tuple[Any, ...]
    stride: Strides


class _UndecidedError(Exception):
    """Sizes that come from data leave a comparison open."""


def strides_like(shape: tuple[Any, ...], given: Sequence[Any]) -> Strides | None:
    """Strides of a result of `shape` of an elementwise operator on tensors and numbers (None stands for an argument that is left out); None where
    torch's own are right or sizes from data leave it open, and where an operand with gaps is converted to another dtype first (on a GPU
    it is not).
    """
    operands: list[Operand] = []
    dtypes, dense = set(), True
    for a in given:
        if isinstance(a, torch.Tensor):
            if a.layout is not torch.strided:
                return None
            operands.append(Operand(tuple(a.shape), a.stride()))
            if a.ndim:
                dtypes.add(a.dtype)
                dense = dense and is_dense(Layout.of(a))
        elif a is not None:
            operands.append(Operand((), ()))
    symbolic = any(type(n) is not int for o in operands for n in (*o.shape, *o.stride))
    if not operands or (symbolic and not any(type(n) is int and n == 1 for n in shape)):
        return None
    try:
        return elementwise_strides(shape, operands) if dense or len(dtypes) <= 1 else None
    except _UndecidedError:
        return None


def elementwise_strides(shape: tuple[Any, ...], operands: Sequence[Operand]) -> Strides:
    """Strides of a result of `shape`, to which `operands` broadcast. Their order matters: the first that tells two dimensions apart says
    which of them is the outer one.
    """
    if all(expressions(o.shape) == expressions(shape) for o in operands):
        row_major = _strides_in_order(shape, list(range(len(shape)))[::-1])
        if 0 in shape or all(_are_alike(*o, row_major) for o in operands):
            return row_major
        orders = {4: [1, 3, 2, 0], 5: [1, 4, 3, 2, 0]}  # channels-last
        if len(shape) in orders:
            channels_last = _strides_in_order(shape, orders[len(shape)])
            if all(_are_alike(*o, channels_last) for o in operands):
                return channels_last
        first = operands[0].stride
        if _is_dense(operands[0]) and all(expressions(o.stride) == expressions(first) for o in operands):
            return first
    return _strides_in_order(shape, _order(shape, [_broadcast(o, shape) for o in operands]))


def _is_dense(operand: Operand) -> bool:
    return is_dense(Layout(torch.float32, operand.shape, operand.stride, 0))


def _are_alike(shape: Sequence[Any], a: Sequence[Any], b: Sequence[Any]) -> bool:
    return all(_equal(n, 1) or _equal(x, y) for n, x, y in zip(shape, a, b, strict=True))


def _broadcast(operand: Operand, shape: tuple[Any, ...]) -> Strides:
    """Its stride for each dimension of the result, 0 where it repeats."""
    missing = len(shape) - len(operand.shape)
    own = zip(operand.shape, operand.stride, shape[missing:], strict=True)
    return (0,) * missing + tuple(0 if _equal(n, 1) and not _equal(m, 1) else s for n, s, m in own)


def _order(shape: tuple[Any, ...], strides: Sequence[Strides]) -> list[int]:
    """Dimensions from the fastest to the slowest: an insertion sort, since comparisons may be undecided."""
    order = list(range(len(shape)))[::-1]
    for i in range(1, len(order)):
        at = i
        for k in range(i - 1, -1, -1):
            sign = _compared(shape, strides, order[k], order[at])
            if sign > 0:
                order[k], order[at] = order[at], order[k]
                at = k
            elif sign < 0:
                break
    return order


def _compared(shape: tuple[Any, ...], strides: Sequence[Strides], a: int, b: int) -> int:
    for s in strides:
        if _equal(s[a], 0) or _equal(s[b], 0):
            continue
        if not _equal(s[a], s[b]):
            return -1 if _less(s[a], s[b]) else 1
        if _less(shape[b], shape[a]):
            return 1
    return 0


def _equal(a: Any, b: Any) -> bool:
    if type(a) is int and type(b) is int:
        return a == b
    if expressions((a,)) == expressions((b,)):
        return True
    return not known(a != b) and _decided(a == b, a, b)


def _less(a: Any, b: Any) -> bool:
    if type(a) is int and type(b) is int:
        return a < b
    return known(a < b) or (not known(a >= b) and _decided(a < b, a, b))


def _decided(condition: Any, *sizes: Any) -> bool:
    """As the example inputs say, which adds a guard. Sizes from data have no example."""
    if any(size_hint(n, -1) < 0 for n in sizes):
        raise _UndecidedError
    return bool(condition)


def _strides_in_order(shape: tuple[Any, ...], order: Sequence[int]) -> Strides:
    strides, step = [0] * len(shape), 1
    for d in order:
        strides[d] = step
        step = step * (1 if type(shape[d]) is int and shape[d] == 0 else shape[d])
    return tuple(strides)


__all__ = ["Operand", "elementwise_strides", "strides_like"]
