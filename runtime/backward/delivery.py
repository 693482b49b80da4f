"""Gradients of a compiled graph's leaves arrive in eager's order where somebody looks: where a leaf has hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..dispatch.autograd.hook_order import is_hooked

Call = Callable[..., Any]


def in_order(apply: Call, order: Sequence[int]) -> Call:
    """The autograd function `apply`, which hands the gradients of the arguments at positions `order` over in that order if one of these has a
    hook.

    All leaves of one autograd node become ready at once, and the engine gives them out in an order of its own. So each leaf gets a node in
    between: the engine takes the node that was made last first, and its leaf next. These nodes are views, passed as further arguments.
    """
    positions, made = tuple(order), tuple(reversed(order))

    def call(*args: Any) -> Any:
        if not is_hooked(*[args[k] for k in positions]):
            return apply(*args)
        ways = {k: args[k].expand_as(args[k]) for k in made}
        return apply(*args, *(ways[k] for k in positions))

    return call


def redirected(gradients: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """What the function returns where `in_order` has passed further arguments: these get the gradients of those at positions `order`."""
    moved = set(order)
    return (*(None if k in moved else g for k, g in enumerate(gradients)), *(gradients[k] for k in order))
