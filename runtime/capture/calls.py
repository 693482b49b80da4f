"""What stands in a captured backward beside autograd's own functions. Dynamo follows these into its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..torch_compat import skip_frame
from ..torch_compat.compiled_autograd import backward_function, may_change

Gradient = torch.Tensor | None


def size_of(carrier: torch.Tensor | int) -> int:
    """A size that changes from call to call. It comes as the second size of an empty tensor, because Dynamo takes plain numbers as constants."""
    return carrier.size(1) if isinstance(carrier, torch.Tensor) else carrier


def carried(size: int) -> torch.Tensor | int:
    """What `size_of` gets in a call. Sizes 0 and less cannot be carried, and are constants."""
    if size <= 0:
        return size
    carrier = torch.empty(0, size)
    may_change(carrier, 1)
    return carrier


def added(first: Gradient, second: Gradient) -> Gradient:
    """The sum of two gradients of one result. A function may have none for it, which is known when it has run."""
    if first is None or second is None:
        return second if first is None else first
    return second + first if first.is_sparse else first + second  # torch adds sparse to dense


def accumulate_grad(leaf: torch.Tensor, before: Gradient, grad: Gradient, has_post_hooks: bool) -> Gradient:
    """Accumulate a gradient into a leaf, as its `AccumulateGrad` node does. Returns the leaf's gradient."""
    (after,) = backward_function("AccumulateGrad")([grad], leaf, before, has_post_hooks)
    leaf.grad = after
    return leaf.grad


def call_hook(hook: Callable[..., Any], value: Any, *more: Any) -> Any:
    """Call a hook with a gradient, several gradients, or what was packed. Returns its result, or `value` if it returns None."""
    found = hook(value, *more)
    return value if found is None else found


def call_post_accumulate_hook(hook: Callable[..., Any], leaf: torch.Tensor) -> torch.Tensor:
    """Call a hook that looks at a leaf whose gradient has just been accumulated. Raises RuntimeError if it returns something."""
    if hook(leaf) is not None:
        raise RuntimeError("a hook of register_post_accumulate_grad_hook should return None")
    return leaf


def before_copied_slice(
    gradients: Sequence[Gradient],
    base: tuple[Sequence[int], Sequence[int], int],
    view: tuple[Sequence[int], Sequence[int], int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tensor was written through a view of it. `base` and `view`: sizes, strides, offset of both. Gives the gradient of the base in memory of its
    own, the view's part of it, and a copy of that part for the function that wrote there.
    """
    (grad,) = gradients
    assert grad is not None
    whole = grad.new_empty_strided(base[0], base[1])
    whole.copy_(grad)
    part = whole.as_strided(view[0], view[1], view[2] - base[2])
    return whole, part, part.clone(memory_format=torch.contiguous_format)


def after_copied_slice(
    needed: Sequence[bool], whole: torch.Tensor, made: Sequence[Gradient], part: torch.Tensor
) -> list[Gradient]:
    """The gradients of a function that wrote through a view: the first is the base's, whose `part` takes what the function `made` for it."""
    gradients: list[Gradient] = [g if need else None for g, need in zip(made, needed, strict=True)]
    if gradients and gradients[0] is not None:
        part.copy_(gradients[0])
        gradients[0] = whole
    return gradients


# Where a hook ends the graph, its call runs by itself. Dynamo would compile that for each hook and each size, and there is nothing in it to compile.
for _call in (call_hook, call_post_accumulate_hook):
    skip_frame(_call)
