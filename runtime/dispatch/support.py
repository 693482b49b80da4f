"""What the generated inverses of views call. `b` is the recorder; nodes carry fake tensors in `meta["val"]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


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


def inverse_permutation(dims: Sequence[int]) -> list[int]:
    """The permutation that undoes `dims` (negative dimensions count from the end)."""
    out = [0] * len(dims)
    for k, d in enumerate(dims):
        out[d % len(dims)] = k
    return out
