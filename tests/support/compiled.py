"""A function compiled anew, strictly: what is not compiled is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import opforge


def compiled(f: Callable[..., Any], folder: Path, **options: object) -> Callable[..., Any]:
    """With sizes that are fixed, kernels in `folder`, and counters at zero."""
    torch._dynamo.reset()
    opforge.reset_stats()
    return torch.compile(
        f, backend="opforge", dynamic=False, options={"strict": True, "cache_dir": str(folder), **options}
    )


__all__ = ["compiled"]
