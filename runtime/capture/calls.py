"""What stands in a captured backward beside autograd's own functions. Dynamo follows these into its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..torch_compat import skip_frame
from ..torch_compat.compiled_autograd import (
    UNNAMED,
    backward_function,
    call_backward,
    cpp_tensor_hooks,
    may_change,
    zeros_of_result,
)

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


def call_function(
    name: str, tensors: Sequence[bool], ctx: Any, saved: list[torch.Tensor], *gradients: Gradient
) -> list[Gradient]:
    """Call the backward of an autograd function in Python. `tensors`: which of its arguments are tensors. Raises what eager raises if its results
    do not fit.
    """
    if any(grad is None for grad in gradients) and _wants_zeros(ctx._forward_cls):
        gradients = tuple([zeros_of_result(ctx, k) if grad is None else grad for k, grad in enumerate(gradients)])
    made = list(call_backward(ctx, saved, *gradients))
    while len(made) > len(tensors) and made[-1] is None:
        made.pop()
    if len(made) != len(tensors):
        counts = f"(expected {len(tensors)}, got {len(made)})"
        raise RuntimeError(f"function {name} returned an incorrect number of gradients {counts}")
    for k, (grad, of_tensor) in enumerate(zip(made, tensors, strict=True)):
        if grad is not None and not of_tensor:
            which = f"at position {k + 1}, but the corresponding forward input was not a Variable"
            raise RuntimeError(f"function {name} returned a gradient different than None {which}")
        if grad is not None and not isinstance(grad, torch.Tensor):
            raise RuntimeError(f"expected Variable or None (got {type(grad).__name__})")
    return made


def _wants_zeros(function: Any) -> bool:
    """Whether the backward of an autograd function is to get zeros where there is no gradient. A context cannot be asked for what its
    `set_materialize_grads` was given; who calls it wants none.
    """
    calls = (function.forward, function.setup_context)
    return not any("set_materialize_grads" in f.__code__.co_names for f in calls)


def fitting_gradients(name: str, made: Sequence[Gradient], described: Sequence[Any]) -> list[Gradient]:
    """The gradients that the function `name` has made, with the sizes and dtypes that the engine checks and converts them to."""
    for k, (grad, of) in enumerate(zip(made, described, strict=True)):
        # Checked here too, since Dynamo wraps what an operator raises while it compiles.
        if grad is not None and of is not None and not _is_expanded(grad.shape, of[1]):
            which = f"at index {k} - got {list(grad.shape)} but expected shape compatible with {list(of[1])}"
            raise RuntimeError(f"Function {name} returned an invalid gradient {which}")
    try:
        return list(backward_function("validate_outputs")(made, described))
    except RuntimeError as error:
        raise RuntimeError(str(error).replace(UNNAMED, f"Function {name} returned an ", 1)) from None


def _is_expanded(sizes: Sequence[int], smaller: Sequence[int]) -> bool:
    """Whether a tensor that is broadcast from the sizes `smaller` may have these sizes."""
    pairs = zip(reversed(sizes), reversed(smaller), strict=False)
    return len(smaller) <= len(sizes) and all(few in (1, many) for many, few in pairs)


def call_tensor_hook(hook: Callable[..., Any], grad: Gradient) -> Gradient:
    """Call a hook of a tensor. Returns the gradient that it puts in the place of `grad`, or `grad` if it returns None."""
    found = hook(grad)
    if found is None or found is grad:
        return grad
    return _replacing(hook, grad, found)


def call_cpp_hooks(number: int, grad: Gradient) -> Gradient:
    """Call the hooks of a tensor that are C++: `retain_grad`. Where there is no gradient they would end the process, and retain nothing."""
    return None if grad is None else cpp_tensor_hooks(number, grad)


def call_node_hook(hook: Callable[..., Any], gradients: tuple[Gradient, ...], *more: Any) -> tuple[Gradient, ...]:
    """Call a hook of a node. Returns the gradients that replace `gradients`, or `gradients` where the hook returns None."""
    found = hook(gradients, *more)
    if found is None or found is gradients:
        return gradients
    if not isinstance(found, tuple):
        raise TypeError(f"expected tuple, but hook returned '{type(found).__name__}'")
    if len(found) != len(gradients):
        counts = f"(got {len(found)}, but expected {len(gradients)})"
        raise RuntimeError(f"hook '{_name(hook)}' has returned an incorrect number of values {counts}")
    return tuple([_replacing(hook, grad, new) for grad, new in zip(gradients, found, strict=True)])


def _replacing(hook: Callable[..., Any], grad: Gradient, found: Any) -> Gradient:
    """What a hook returned in the place of a gradient. Raises eager's error where it does not fit: the rest of the backward would compute with it."""
    if found is None or found is grad:
        return found
    if grad is None:
        raise RuntimeError("can't replace a None gradient with a non-None value")
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"expected Variable, but hook returned '{type(found).__name__}'")
    if found.dtype != grad.dtype or found.device.type != grad.device.type or found.layout != grad.layout:
        types = f"(was {grad.type()} got {found.type()})"
        raise RuntimeError(f"hook '{_name(hook)}' has changed the type of value {types}")
    if found.shape != grad.shape:
        raise RuntimeError(f"hook '{_name(hook)}' has changed the size of value")
    return found


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__name__", "<unknown>")


def call_unpack_hook(hook: Callable[[Any], torch.Tensor], packed: Any) -> torch.Tensor:
    """Call a hook that gives the tensor that another one has packed."""
    found = hook(packed)
    if not isinstance(found, torch.Tensor):
        kind = type(found).__name__
        raise TypeError(f"Output of saved tensor unpack_hook expected to be a Tensor but got result of type {kind}")
    return found


def call_unpack_hook_of_slice(part: Gradient, hook: Callable[[Any], torch.Tensor], packed: Any) -> Gradient:
    """As `call_unpack_hook`, for a function that wrote through a view. Without a gradient of that `part` eager does not run it."""
    return None if part is None else call_unpack_hook(hook, packed)


def call_post_accumulate_hook(hook: Callable[..., Any], leaf: torch.Tensor) -> torch.Tensor:
    """Call a hook that looks at a leaf whose gradient has just been accumulated. Raises RuntimeError if it returns another tensor."""
    found = hook(leaf)
    if found is not None and _replacing(hook, leaf, found) is not leaf:
        raise RuntimeError("Tensor post accumulate grad hooks should return None.")
    return leaf


def before_copied_slice(
    gradients: Sequence[Gradient],
    base: tuple[Sequence[int], Sequence[int], int],
    view: tuple[Sequence[int], Sequence[int], int],
) -> tuple[Gradient, Gradient, Gradient]:
    """A tensor was written through a view of it. `base` and `view`: sizes, strides, offset of both. Gives the gradient of the base in memory of its
    own, the view's part of it, and a copy of that part for the function that wrote there.
    """
    (grad,) = gradients
    if grad is None:
        return None, None, None
    # With symbols that turn out constant Dynamo could not tell the strides of what it makes. Mostly the gradient has them already.
    whole = torch.empty_like(grad)
    if list(whole.stride()) != list(base[1]):
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
for _call in (call_tensor_hook, call_node_hook, call_post_accumulate_hook):
    skip_frame(_call)
