"""What wrappers call besides methods of tensors."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..torch_compat import disable_autocast, pytree


def reinterpreted(
    source: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """A tensor of `dtype` in the storage of `source`; `offset` counts elements of `dtype` from the byte where
    `source` begins.
    """
    first = source.storage_offset() * source.element_size() // dtype.itemsize
    out = torch.empty(0, dtype=dtype, device=source.device)
    out.set_(source.untyped_storage(), first + offset, size, stride)
    return out


NAMESPACE: dict[str, Any] = {
    "as_strided": torch.as_strided,
    "increment_version": torch.autograd.graph.increment_version,
    "math": math,
    "no_autocast": disable_autocast,
    "no_grad": torch.no_grad,
    "reinterpreted": reinterpreted,
    "tree_unflatten": pytree.tree_unflatten,
}
"""Names that wrapper source may read."""
