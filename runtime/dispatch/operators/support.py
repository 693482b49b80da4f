"""What generated inverses of views and decompositions call. `b` is the recorder; nodes carry fake tensors in `meta["val"]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...torch_compat import minor_version, size_hint
from ..storage import overlap
from ..storage.regions import Layout
from .elementwise import strides_like


def reshape(b: Any, node: fx.Node, size: Sequence[Any]) -> fx.Node:
    """`node` with another shape of as many elements."""
    result: fx.Node = b.reshape(node, size)
    return result


def size_of(node: fx.Node) -> tuple[Any, ...]:
    """The sizes of a node's tensor."""
    return tuple(node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    """The dtype of a node's tensor."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def total(sizes: Sequence[Any]) -> Any:
    """The sum of sizes."""
    return sum(sizes)


def bound(x: Any, of: fx.Node | torch.Tensor | Sequence[Any], dim: int) -> Any:
    """The bound `x` of a slice, counted from the front: one below zero of `dim` of a tensor (or of these sizes) is counted from its end, and is 0
    if it lies before the front. Symbols are compared as torch's own kernels compare them, so that the same guards hold.
    """
    if x is None or not x < 0:
        return x
    sizes = size_of(of) if isinstance(of, fx.Node) else of.shape if isinstance(of, torch.Tensor) else of
    x = x + sizes[dim]
    return 0 if x < 0 else x


def is_from_end(start: Any, end: Any, of: torch.Tensor | Sequence[Any]) -> bool:
    """Whether a bound of a slice is below zero, where that is not a matter of numbers alone."""
    sizes = of.shape if isinstance(of, torch.Tensor) else of
    symbolic = any(isinstance(n, torch.SymInt) for n in (start, end, *sizes))
    return symbolic and any(x is not None and bool(x < 0) for x in (start, end))


def is_followed(x: torch.Tensor) -> bool:
    """Whether autograd follows what is computed of a tensor."""
    return x.requires_grad and torch.is_grad_enabled()


def has_symbolic_sizes(x: torch.Tensor) -> bool:
    """Whether a size of a tensor is a symbol."""
    return any(isinstance(n, torch.SymInt) for n in x.shape)


def is_torch_before(major: int, minor: int) -> bool:
    """Whether the installed torch is older than this version."""
    return tuple(map(int, minor_version().split("."))) < (major, minor)


def interleaved_sizes(x: torch.Tensor, y: torch.Tensor, k: int) -> list[Any]:
    """The sizes of `x`, with as many dimensions as the tensor with more, each beside a 1: before it (`k` is 0), or behind it (1)."""
    padded = [1] * (y.ndim - x.ndim) + list(x.shape)
    return [n for size in padded for n in ((1, size) if k else (size, 1))]


def block_sizes(x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    """The sizes of a tensor that has a block of the sizes of `y` for each element of `x`."""
    rank = max(x.ndim, y.ndim)
    first, second = ([1] * (rank - t.ndim) + list(t.shape) for t in (x, y))
    return [n * m for n, m in zip(first, second, strict=True)]


def given(value: Any, otherwise: Any) -> Any:
    """A value, or what stands for None."""
    return otherwise if value is None else value


def is_single_or_double(x: torch.Tensor) -> bool:
    """Whether a tensor of a number has the number's value for kernels as the number itself would."""
    return x.dtype in (torch.float32, torch.float64)


def last_dims(x: torch.Tensor, sizes: Sequence[Any], weight: torch.Tensor | None = None) -> list[int]:
    """The last dimensions of a tensor, which have these sizes, as a weight has. Raises RuntimeError where one has others, as eager's kernels of
    norms do.
    """
    n = len(sizes)
    if not n or n > x.ndim or any(a != b for a, b in zip(x.shape[x.ndim - n :], sizes, strict=True)):
        raise RuntimeError(
            f"Given normalized_shape={list(sizes)}, expected input with these last sizes, but got input of size {list(x.shape)}"
        )
    if weight is not None and (weight.ndim != n or any(a != b for a, b in zip(weight.shape, sizes, strict=True))):
        raise RuntimeError(
            f"Expected weight to be of same shape as normalized_shape, but got weight of shape {list(weight.shape)} and "
            f"normalized_shape = {list(sizes)}"
        )
    return list(range(-n, 0))


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which eager's kernels compute sums of a tensor: float32 (or complex64) for half precision."""
    return {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}.get(
        x.dtype, x.dtype
    )


def epsilon(x: torch.Tensor) -> float:
    """The machine epsilon of the dtype in which sums of a tensor are computed."""
    return torch.finfo(wide_dtype(x)).eps


def is_cube(x: torch.Tensor) -> bool:
    """Whether all sizes are equal. Symbols are compared as torch's own kernels compare them, so that the same guards hold."""
    return all(n == x.shape[0] for n in x.shape[1:])


def diagonal_layout(x: torch.Tensor, row: Any) -> tuple[list[Any], list[Any], Any]:
    """Sizes, strides and offset of the view that begins with the first element of the row `row` and goes one further in all dimensions; below
    the first row it goes on to the last row, whatever the number of columns. Raises RuntimeError where a tensor has no such elements.
    """
    if x.ndim < 2:
        raise RuntimeError("dimensions must larger than 1")
    if x.ndim > 2 and not is_cube(x):
        raise RuntimeError("all dimensions of input must be of equal length")
    columns = x.shape[1]
    if isinstance(row, int) and row == 0:
        count = torch.sym_min(x.shape[0], columns)
    else:
        count = (x.numel() + columns) // (columns + 1) - columns
    return [count], [total(x.stride())], x.storage_offset() + row * x.stride(0)


def last_product(tensors: Sequence[torch.Tensor], rank: int = 1) -> int:
    """How many of the matrices are on the left of the last product, where products of neighbours are taken in the order with the fewest
    multiplications; -1 for all but one, 0 where there is nothing to choose. Symbolic sizes count as those of the example inputs. The first
    and the last tensor have at least `rank` dimensions. Raises RuntimeError where eager's kernel does.
    """
    n = len(tensors)
    if n < 2:
        raise RuntimeError(f"multi_dot(): expected at least 2 tensors but got {n}")
    if any(not (rank if k in (0, n - 1) else 2) <= t.ndim <= 2 for k, t in enumerate(tensors)):
        raise RuntimeError(f"multi_dot(): the tensors have {[t.ndim for t in tensors]} dimensions")
    if n == 2:
        return 0
    sizes = [
        1 if tensors[0].ndim == 1 else tensors[0].shape[0],
        tensors[0].shape[-1],
        *(t.shape[-1] for t in tensors[1:]),
    ]
    if tensors[-1].ndim == 1:
        sizes[-1] = 1
    rows = [size_hint(x, 1) for x in sizes]
    cost = [[0] * n for _ in range(n)]
    split = 0
    for length in range(2, n + 1):
        for i in range(n - length + 1):
            j = i + length - 1
            costs = {k: cost[i][k - 1] + cost[k][j] + rows[i] * rows[k] * rows[j + 1] for k in range(i + 1, j + 1)}
            split = min(costs, key=lambda k: (costs[k], -k if n == 3 else k))
            cost[i][j] = costs[split]
    return -1 if split == n - 1 else split


def is_exact_scale(x: Any) -> bool:
    """Whether a size times a factor, rounded down, is the size itself or twice the size only where the factor is 1 or 2: it is an integer, or less
    than 1. `x` is a factor, a list of factors, or None.
    """
    factors = x if isinstance(x, (list, tuple)) else [x]
    return all(f is None or (isinstance(f, (int, float)) and (f % 1 == 0 or f < 1)) for f in factors)


def inverse_permutation(dims: Sequence[int]) -> list[int]:
    """The permutation that undoes `dims` (negative dimensions count from the end)."""
    out = [0] * len(dims)
    for k, d in enumerate(dims):
        out[d % len(dims)] = k
    return out


def is_empty(t: torch.Tensor) -> bool:
    """Whether a tensor is known to have no elements."""
    return any(type(n) is int and n == 0 for n in t.shape)


def size(t: torch.Tensor, dim: int) -> Any:
    """A size of a tensor."""
    return t.shape[dim]


def row_major(t: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the same sizes, dtype and device."""
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def is_row_major(t: torch.Tensor) -> bool:
    """Whether a tensor is known to be contiguous; decided on expressions, which adds no guard."""
    return overlap.is_row_major(Layout.of(t))


def elementwise(*operands: Any) -> torch.Tensor:
    """A tensor laid out as the result of an elementwise operator on tensors and numbers."""
    tensors = [t for t in operands if isinstance(t, torch.Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    strides = strides_like(tuple(shape), operands)
    if strides is not None:
        return torch.empty_strided(shape, strides, dtype=tensors[0].dtype, device=tensors[0].device)
    # Of sizes that are symbols torch's own kernels agree about a sum.
    return torch.empty_like(tensors[0]) if len(operands) == 1 else tensors[0] + operands[1]


def suggested(t: torch.Tensor, shape: Sequence[Any] | None = None) -> torch.Tensor:
    """A tensor that is channels-last if `t` is, else contiguous; of the sizes of `t`, or of `shape`."""
    shape = t.shape if shape is None else shape
    return torch.empty(shape, dtype=t.dtype, device=t.device, memory_format=suggested_format(t))


def suggested_format(t: torch.Tensor) -> torch.memory_format:
    """Channels-last if the strides order the dimensions so (sizes of 1 included), else contiguous."""
    for rank, order, answer in (
        (4, (1, 3, 2, 0), torch.channels_last),
        (5, (1, 4, 3, 2, 0), torch.channels_last_3d),
    ):
        if t.ndim == rank and t.stride(1) != 0 and _ascending(t, order):
            return answer
    return torch.contiguous_format


def _ascending(t: torch.Tensor, order: tuple[int, ...]) -> bool:
    least: Any = 0
    for d in order:
        if t.shape[d] == 0 or t.stride(d) < least or (d == 0 and least == t.stride(1)):
            return False
        least = t.stride(d) * t.shape[d] if t.shape[d] > 1 else t.stride(d)
    return True
