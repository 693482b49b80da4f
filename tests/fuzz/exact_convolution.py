"""Convolutions and their gradients as sums over the positions of the kernel, for arrays of any dtype: numpy has none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

Array = Any
Places = tuple[slice, ...]


def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    """What `aten.convolution` gives for a batch."""
    if transposed:
        sizes = [
            (n - 1) * s - 2 * p + d * (k - 1) + 1 + more
            for n, s, p, d, k, more in zip(
                x.shape[2:], stride, padding, dilation, weight.shape[2:], output_padding, strict=True
            )
        ]
        out = _spread(x, weight, sizes, stride, padding, dilation, groups)
    else:
        sizes = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, s, p, d, k in zip(x.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True)
        ]
        out = _gathered(x, weight, sizes, stride, padding, dilation, groups)
    return out if bias is None else out + bias.reshape(-1, *[1] * len(sizes))


def convolution_backward(
    grad: Array,
    x: Array,
    weight: Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Array, ...]:
    """The gradients of `aten.convolution` that the mask asks for."""
    how = (stride, padding, dilation, groups)
    found = []
    if output_mask[0]:
        found.append((_gathered if transposed else _spread)(grad, weight, x.shape[2:], *how))
    if output_mask[1]:
        small, large = (x, grad) if transposed else (grad, x)
        found.append(_of_weight(small, large, weight.shape, *how))
    if output_mask[2]:
        found.append(grad.sum(axis=(0, *range(2, grad.ndim))))
    return tuple(found)


def _places(
    kernel: Sequence[int], sizes: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], Places]]:
    """Each position of the kernel, and where it lies in the padded large side for all of `sizes` positions of the small one."""
    for at in product(*map(range, kernel)):
        yield (
            at,
            tuple(
                slice(k * d, k * d + (n - 1) * s + 1, s) for k, d, n, s in zip(at, dilation, sizes, stride, strict=True)
            ),
        )


def _apart(a: Array, groups: int, axis: int) -> Array:
    """`a` with an axis of groups before the channels at `axis`."""
    return a.reshape(*a.shape[:axis], groups, a.shape[axis] // groups, *a.shape[axis + 1 :])


def _padded(x: Array, padding: Sequence[int]) -> Array:
    return np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])


def _gathered(
    large: Array, weight: Array, sizes: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: int
) -> Array:
    """The small side from the large one: `weight` has the small side's channels first."""
    source, w = _apart(_padded(large, padding), groups, 1), _apart(weight, groups, 0)
    out: Any = 0
    for at, places in _places(weight.shape[2:], sizes, stride, dilation):
        out = out + np.einsum("ngc...,goc->ngo...", source[(..., *places)], w[(..., *at)])
    return out.reshape(large.shape[0], weight.shape[0], *sizes)


def _spread(
    small: Array, weight: Array, sizes: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: int
) -> Array:
    """The large side, of these sizes, from the small one."""
    source, w = _apart(small, groups, 1), _apart(weight, groups, 0)
    reach = [
        max(n + 2 * p, (m - 1) * s + d * (k - 1) + 1)
        for n, p, m, s, d, k in zip(sizes, padding, small.shape[2:], stride, dilation, weight.shape[2:], strict=True)
    ]
    out = np.zeros((small.shape[0], groups, weight.shape[1], *reach), small.dtype)
    for at, places in _places(weight.shape[2:], small.shape[2:], stride, dilation):
        out[(..., *places)] += np.einsum("ngo...,goc->ngc...", source, w[(..., *at)])
    inner = tuple(slice(p, p + n) for p, n in zip(padding, sizes, strict=True))
    return out.reshape(small.shape[0], groups * weight.shape[1], *reach)[(..., *inner)]


def _of_weight(
    small: Array, large: Array, shape: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: int
) -> Array:
    source, grad = _apart(_padded(large, padding), groups, 1), _apart(small, groups, 1)
    out = np.zeros((groups, shape[0] // groups, *shape[1:]), small.dtype)
    for at, places in _places(shape[2:], small.shape[2:], stride, dilation):
        read = source[(..., *places)]
        out[(..., *at)] = np.einsum(
            "ngos,ngcs->goc", grad.reshape(*grad.shape[:3], -1), read.reshape(*read.shape[:3], -1)
        )
    return out.reshape(shape)
