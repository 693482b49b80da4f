"""What a program does with autograd itself, and the wrapper would not do again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ....errors import UnsupportedError
from ...torch_compat import made_without_grad


def gradient_of(t: Any) -> Any:
    """The `grad` of a leaf; None for anything else."""
    return t.grad if isinstance(t, torch.Tensor) and t.is_leaf else None


def check_effects(inputs: Iterable[tuple[Any, Any]], results: Sequence[Any], training: bool) -> None:
    """Raises `UnsupportedError` where the program did more with autograd than the wrapper would do again. `inputs` come with the gradients
    that they had.
    """
    followed = training or torch.is_inference_mode_enabled()
    own: set[int] = set()
    for k, (t, before) in enumerate(inputs):
        followed |= isinstance(t, torch.Tensor) and t.requires_grad
        own.add(id(t))
        if gradient_of(t) is not before:
            raise UnsupportedError(f"the program gives input {k} a gradient (`backward()`)")
    for k, t in enumerate(results):
        if not isinstance(t, torch.Tensor):
            continue
        if t.retains_grad and not t.is_leaf:
            raise UnsupportedError(
                f"output {k} retains its gradient (`retain_grad()`), told so inside; tell it outside"
            )
        if t.requires_grad and not followed:
            raise UnsupportedError(f"output {k} requires grad, although no input does; make its leaf outside")
        if (
            t.requires_grad
            and t.is_leaf
            and id(t) not in own
            and not (_view_of_followed(t) or torch.is_inference_mode_enabled())
        ):
            raise UnsupportedError(f"output {k} is made a leaf (`requires_grad_()`), told so inside; tell it outside")


def _view_of_followed(t: torch.Tensor) -> bool:
    """Whether autograd calls `t` a leaf only because it is a view, made under `no_grad`, of what it follows."""
    return t._is_view() and made_without_grad(t) and t._base is not None and t._base.requires_grad
