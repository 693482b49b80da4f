"""The functions of the bodies in specs/random.yaml: shapes and dtypes of fake tensors, and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

pi = math.pi
ln1p = math.log1p
Dtype = torch.dtype | str


def _dtype(d: Dtype) -> torch.dtype:
    return getattr(torch, d) if isinstance(d, str) else d


def shape(x: torch.Tensor) -> Sequence[Any]:
    """The sizes of a tensor; symbolic ones stay so."""
    return x.shape


def dtype(x: torch.Tensor) -> torch.dtype:
    return x.dtype


def is_float(d: Dtype) -> bool:
    return _dtype(d).is_floating_point


def is_int(d: Dtype) -> bool:
    return not is_float(d) and not _dtype(d).is_complex and _dtype(d) != torch.bool


def wide(d: Dtype) -> torch.dtype:
    """The dtype to compute in: float32 for float16 and bfloat16."""
    return torch.float64 if _dtype(d) == torch.float64 else torch.float32


def smallest(d: Dtype) -> int:
    """The least integer that the dtype holds, of a float the least up to which it holds all."""
    d = _dtype(d)
    return -largest(d) if d.is_floating_point else 0 if d == torch.bool else int(torch.iinfo(d).min)


def largest(d: Dtype) -> int:
    """The greatest integer that the dtype holds, of a float the greatest up to which it holds all."""
    d = _dtype(d)
    if d.is_floating_point:
        return 2 ** (round(-math.log2(torch.finfo(d).eps)) + 1)
    return 1 if d == torch.bool else int(torch.iinfo(d).max)


def fits(d: Dtype, *numbers: float) -> bool:
    """Whether the numbers are finite ones of a float dtype."""
    limit = torch.finfo(_dtype(d)).max
    return all(-limit <= n <= limit for n in numbers)


def half_step(d: Dtype) -> float:
    """Half of the distance between two uniform random numbers of a float dtype."""
    return float(torch.finfo(_dtype(d)).eps) / 4
