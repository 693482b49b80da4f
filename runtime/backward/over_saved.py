"""Backwards that write gradients over what was saved for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..torch_compat import storage_uses, tensor_uses


def over_saved(
    ready: Callable[[], Callable[[list[Any]], Any]], into: Mapping[int, int], scaled: bool
) -> Callable[[list[Any]], list[Any] | None]:
    """A function of a backward's arguments, which gives the gradients; or None, and has done nothing, where somebody else may still look at a
    tensor that it would write: a graph that is retained, a hook, a holder of `saved_tensors`.

    ready   the compiled backward that writes in place, and returns None for what it has written.
    into    positions of arguments → of the gradients that are written there.
    scaled  all gradients are what is saved times the last argument: where that is 1, they are there already.
    """

    def call(arguments: list[Any]) -> list[Any] | None:
        if any(_uses(arguments, k) != _ALONE for k in into):
            return None
        written = {gradient: arguments[k] for k, gradient in into.items()}
        if scaled and arguments[-1].device.type == "cpu" and arguments[-1].item() == 1:
            return [written[k] for k in range(len(written))]
        gradients = list(ready()(arguments))
        for k, t in written.items():
            gradients[k] = t
        return gradients

    return call


def _uses(tensors: list[Any], k: int) -> tuple[int, int, int, int]:
    """How often the tensor at a position is used: by Python, as a tensor, its memory, and the memory's Python object, of which there is one."""
    t = tensors[k]
    memory = t.untyped_storage()
    return sys.getrefcount(t), tensor_uses(t), storage_uses(memory._cdata), sys.getrefcount(memory)


_ALONE = _uses([torch.empty(1)], 0)
