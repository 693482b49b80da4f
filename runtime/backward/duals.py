"""A compiled backward while a level of `torch.autograd.forward_ad` is on: its gradients have tangents, as those of an eager one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.forward_ad import make_dual, unpack_dual

from ..dispatch.autograd.again import Again
from ..dispatch.autograd.joint import written_since
from ..observe import counters
from ..torch_compat import own_grad, pytree, tangents_followed
from .batched import Kept


def backward_of_duals(
    backward: Callable[..., Any], ctx: Any, gradients: Sequence[Any], again: Again | None, partial: bool
) -> tuple[Any, ...]:
    """What `backward(ctx, *gradients)` would return if it were an eager one; `partial`: it takes None for a result without a gradient.

    A backward is linear in what it is given: it makes the tangents of its gradients of the tangents of what it is given. How it moves itself,
    with tangents of the forward's inputs (`again`), no formula of the compiled graph says: the program is run once more.
    """
    split = [unpack_dual(g) if type(g) is torch.Tensor else (g, None) for g in gradients]
    given, moved = [p for p, _ in split], [t for _, t in split]
    parts: list[Sequence[Any]] = []
    if again is not None and any(given[k] is not None for _, k in again.results):
        parts.append(_moving(again, ctx.arguments, given))
    with tangents_followed(False):
        if all(t is None for t in moved):
            out = backward(ctx, *given)
        else:
            kept = Kept(ctx)
            out = backward(kept, *given)
            parts.append(backward(kept, *(moved if partial else _whole(moved, given))))
            ctx.maybe_clear_saved_tensors()
    tangents = [_sum(of) for of in zip(*parts, strict=True)] if parts else [None] * len(out)
    return tuple(g if g is None or t is None else make_dual(g, t) for g, t in zip(out, tangents, strict=True))


def _sum(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [t for t in parts if t is not None]
    return there[0] + there[1] if len(there) > 1 else there[0] if there else None


def _whole(gradients: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Gradients with zeros where there is none."""
    return [
        None if t is None else torch.zeros_like(t) if g is None else g for g, t in zip(gradients, like, strict=True)
    ]


def kept_arguments(again: Again, arguments: Sequence[Any]) -> tuple[list[Any], list[int | None]]:
    """The arguments of a forward that is about to run, and the versions of those that it does not write: of the others copies."""
    kept = [a.clone() if k in again.written else a for k, a in enumerate(arguments)]
    watched = [isinstance(a, torch.Tensor) and k not in again.written for k, a in enumerate(arguments)]
    return kept, [a._version if w else None for a, w in zip(arguments, watched, strict=True)]


def _moving(again: Again, arguments: tuple[list[Any], list[int | None]], given: Sequence[Any]) -> list[Any]:
    """Tangents of the gradients of a forward's arguments, for gradients that do not move themselves."""
    kept, versions = arguments
    for a, version in zip(kept, versions, strict=True):
        if version is not None and a._version != version:
            raise written_since(a, version)
    counters.count_fallback("a gradient is computed inside of dual_level: its tangents are those of eager kernels")
    with again.surroundings.entered(), torch.enable_grad(), tangents_followed(True):
        leaves: dict[int, Any] = {k: kept[k] for k in again.held}
        for k in {*again.sources}:
            leaves[k] = _leaf(kept[k], k in again.written)
        entered = [leaves[k] for k in again.sources]
        for i, k in again.moved.items():
            entered[i] = make_dual(entered[i], _leaf(kept[k], k in again.written).detach())
        flat = pytree.tree_leaves(again.program(*entered))
        pairs = [(flat[r], given[k]) for r, k in again.results if given[k] is not None and flat[r].requires_grad]
        wanted = [k for k, t in leaves.items() if isinstance(t, torch.Tensor) and t.requires_grad]
        if not pairs or not wanted:
            return [None] * len(kept)
        found = own_grad([r for r, _ in pairs], [leaves[k] for k in wanted], [g for _, g in pairs], allow_unused=True)
    tangents = {k: None if g is None else unpack_dual(g).tangent for k, g in zip(wanted, found, strict=True)}
    return [tangents.get(k) for k in range(len(kept))]


def _leaf(value: Any, written: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    own = value.detach().clone() if written else value.detach()
    return own.requires_grad_(value.requires_grad)
