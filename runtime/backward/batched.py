"""A compiled backward under `vmap` (`is_grads_batched=True`, vectorized jacobians): kernels take plain memory, so it runs once for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..torch_compat import below_vmap


def backward_by_rows(backward: Callable[..., Any], ctx: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
    """What `backward(ctx, *gradients)` would return if it were an eager one, for gradients of which `vmap` maps over some."""
    kept = Kept(ctx)

    def rows(whole: list[Any], mapped: list[bool], size: int) -> list[Any]:
        # Of no rows the sizes are told by one row of zeros.
        take = (lambda t, k: t[k]) if size else (lambda t, k: t.new_zeros(t.shape[1:]))
        each = [
            backward(kept, *(take(t, k) if m else t for t, m in zip(whole, mapped, strict=True)))
            for k in range(max(size, 1))
        ]
        return [None if of[0] is None else torch.stack(of)[:size] for of in zip(*each, strict=True)]

    out = below_vmap(rows, list(gradients))
    ctx.maybe_clear_saved_tensors()
    return tuple(out)


class Kept:
    """A context whose saved tensors stay from one row to the next."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.saved_tensors = ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def maybe_clear_saved_tensors(self) -> None:
        """Not before the last row."""
