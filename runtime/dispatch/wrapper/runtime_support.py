"""What wrappers call besides methods of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...torch_compat import disable_autocast, pytree, refuses_writes
from ..autograd.hook_order import is_hooked


def reinterpreted(
    source: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], first: int, offset: int
) -> torch.Tensor:
    """A tensor of `dtype` in the storage of `source`; `offset` counts elements of `dtype` from the byte where
    element `first` of the source's storage begins. Autograd knows it as a view of the source.
    """
    wide = max(source.element_size(), dtype.itemsize)
    first = first * source.element_size() // dtype.itemsize + offset
    past = first + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    start, end = first * dtype.itemsize // wide * wide, -(-past * dtype.itemsize // wide) * wide
    if 0 in size:
        end = start  # the storage may hold nothing, whatever the offset says
    flat = source.as_strided(((end - start) // source.element_size(),), (1,), start // source.element_size())
    # Autograd follows the two parts of complex numbers, and no other change of the dtype.
    if flat.is_complex() and dtype is flat.dtype.to_real():
        seen = torch.view_as_real(flat)
    elif dtype.is_complex and flat.dtype is dtype.to_real():
        seen = torch.view_as_complex(flat.unflatten(0, (-1, 2)))
    else:
        seen = flat.view(dtype)
    return seen.as_strided(size, stride, first)


def increment_shared_version(tensors: Sequence[torch.Tensor]) -> None:
    """Tells autograd of one write to all these tensors; those that share a counter, as views of one tensor do, move it once."""
    before = [None if t.is_inference() else t._version for t in tensors]
    for t, version in zip(tensors, before, strict=True):
        if version is None or t._version == version:
            torch.autograd.graph.increment_version(t)


NAMESPACE: dict[str, Any] = {
    "as_strided": torch.as_strided,
    "enable_grad": torch.enable_grad,
    "is_hooked": is_hooked,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "increment_shared_version": increment_shared_version,
    "increment_version": torch.autograd.graph.increment_version,
    "math": math,
    "no_autocast": disable_autocast,
    "no_grad": torch.no_grad,
    "refuses_writes": refuses_writes,
    "reinterpreted": reinterpreted,
    "set_grad_enabled": torch.set_grad_enabled,
    "tree_unflatten": pytree.tree_unflatten,
}
"""Names that wrapper source may read."""
