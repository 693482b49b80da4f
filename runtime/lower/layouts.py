"""How tensors of a traced graph lie in memory."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.storage.overlap import is_row_major
from ..dispatch.storage.regions import Layout


def is_laid_out_by_rows(t: torch.Tensor) -> bool:
    """Asked of the expressions: a question to torch would add a guard that fixes sizes which nodes before this one have as symbols."""
    return is_row_major(Layout.of(t))


def is_dense(t: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or repetition, in some order of the dimensions (known sizes only)."""
    if not Layout.of(t).plain:
        return False
    step = 1
    for s, n in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if s != step:
            return False
        step *= n
    return True


def slowest_first(t: torch.Tensor) -> list[int]:
    """The dimensions of a dense tensor, from the slowest to the fastest: with them in this order, storage order is row-major order."""
    if is_laid_out_by_rows(t):
        return list(range(t.ndim))
    return sorted(range(t.ndim), key=lambda d: (-t.stride()[d], t.shape[d]))


def is_empty(t: Any) -> bool:
    """Whether a tensor is known to have no elements."""
    return isinstance(t, torch.Tensor) and any(type(n) is int and n == 0 for n in t.shape)


def repeats(t: torch.Tensor) -> bool:
    """Whether a (fake) tensor has a dimension of stride 0 that says the same element more than once."""
    return any(
        type(s) is int and s == 0 and (type(n) is not int or n > 1) for n, s in zip(t.shape, t.stride(), strict=True)
    )


__all__ = ["is_dense", "is_empty", "is_laid_out_by_rows", "repeats"]
