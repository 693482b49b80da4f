"""Compiled functions of float32 beside eager and a float64 run, results and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .accuracy import assert_as_accurate


def judge(compiled: Callable[..., Any], program: Callable[..., Any], inputs: Sequence[Tensor], grad: bool) -> None:
    """Are the leaves of the results, and with `grad` the inputs' gradients, as accurate as eager's, and other values equal?"""

    def run(function: Callable[..., Any], dtype: torch.dtype) -> list[Any]:
        leaves = [t.to(dtype).requires_grad_(grad) for t in inputs]
        with torch.set_grad_enabled(grad):
            out = pytree.tree_leaves(function(*leaves))
        if not grad:
            return out
        followed = [t for t in out if t.requires_grad]
        loss = sum((t * (t.detach() + 1).cos()).sum() for t in followed)
        return [*(t.detach() for t in out), *torch.autograd.grad(loss, leaves, allow_unused=True)]

    ours, theirs, exact = run(compiled, torch.float32), run(program, torch.float32), run(program, torch.float64)
    for a, b, truth in zip(ours, theirs, exact, strict=True):
        if b is None:
            assert a is None
        elif isinstance(b, Tensor) and b.is_floating_point():
            assert a.device == b.device
            assert_as_accurate(a.contiguous(), b.contiguous(), truth)
        else:
            assert a == b


__all__ = ["judge"]
