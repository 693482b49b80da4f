"""Backwards that write gradients over what was saved for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..torch_compat import keeps_graph, storage_uses, tensor_uses

Boxed = Callable[[list[Any]], Any]


def over_saved(
    in_place: Callable[[], Boxed], plain: Callable[[], Boxed], into: Mapping[int, int], scaled: bool
) -> Callable[[list[Any], bool], Boxed]:
    """A function of a backward's arguments, and of whether hooks have packed what was saved. It compiles what these arguments need, while autograd
    still has what it saved, and returns the function that gives the gradients for them. That one writes over saved tensors only if nobody
    else may still look at them: a graph that is retained, a hook, a holder of `saved_tensors`.

    in_place  the compiled backward that writes in place, and returns None for what it has written.
    plain     the one that does not.
    into      positions of arguments → of the gradients that are written there.
    scaled    all gradients are what is saved times the last argument: where that is 1, they are there already.
    """

    def choose(arguments: list[Any], hooked: bool) -> Boxed:
        there = scaled and arguments[-1].device.type == "cpu" and arguments[-1].item() == 1
        # What hooks return may have any number of holders, and which of them let it go is known only afterwards: both may run.
        may_write = hooked or all(_will_be_alone(arguments, k) for k in into)
        written_by = in_place() if may_write and not there else None
        otherwise = plain() if hooked or not may_write else None

        def run(arguments: list[Any]) -> Any:
            if not may_write or any(_uses(arguments, k) != _ALONE for k in into):
                # Only another thread that has taken hold of a tensor meanwhile makes a program necessary that is not compiled yet.
                return (otherwise or plain())(arguments)
            written = {gradient: arguments[k] for k, gradient in into.items()}
            if written_by is None:
                return [written[k] for k in range(len(written))]
            gradients = list(written_by(arguments))
            for k, t in written.items():
                gradients[k] = t
            return gradients

        return run

    return choose


def _will_be_alone(tensors: list[Any], k: int) -> bool:
    """Whether nobody but the list will use the tensor at a position once autograd gives up what it has saved."""
    found = tuple(n - alone for n, alone in zip(_uses(tensors, k), _ALONE, strict=True))
    return found == _NOBODY or (found in _AUTOGRAD and not keeps_graph())


def _uses(tensors: list[Any], k: int) -> tuple[int, int, int, int]:
    """How often the tensor at a position is used: by Python, as a tensor, its memory, and the memory's Python object, of which there is one."""
    t = tensors[k]
    memory = t.untyped_storage()
    return sys.getrefcount(t), tensor_uses(t), storage_uses(memory._cdata), sys.getrefcount(memory)


_ALONE = _uses([torch.empty(1)], 0)
_NOBODY = (0, 0, 0, 0)
_AUTOGRAD = ((1, 1, 0, 0), (0, 0, 1, 0))
"""Uses by autograd, which keeps the tensor itself, or of a result another tensor in its memory."""
