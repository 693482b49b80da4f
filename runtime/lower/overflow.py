"""Numbers among an operator's arguments that eager may refuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import torch


def too_large(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Iterable[Any]) -> str | None:
    """Why the eager kernel is to be asked: a number that the dtype of a result has no place for. Some kernels convert it to that dtype and
    raise ("value cannot be converted … without overflow"), others compute in a wider one.
    """
    found: list[int | float] = []
    for k, a in enumerate(op._schema.arguments):
        value = args[k] if k < len(args) else kwargs.get(a.name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and "number" in str(a.type):
            found.append(value)
    if not found:
        return None
    for t in results:
        if not isinstance(t, torch.Tensor) or t.dtype == torch.bool:
            continue
        for value in found:
            if _has_no_place(value, t.dtype):
                return f"the number {value} is none of {t.dtype}"
    return None


def _has_no_place(value: int | float, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return abs(value) > torch.finfo(dtype).max and (isinstance(value, int) or isfinite(value))
    limits = torch.iinfo(dtype)
    return isinstance(value, float) and not limits.min <= value <= limits.max


__all__ = ["too_large"]
