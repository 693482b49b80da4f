"""What a generated wrapper needs while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import config
from ..torch_compat import empty_strided_cpu as empty_strided
from ..torch_compat import reinterpret_tensor as reinterpret

_ERRORS: dict[str, type[Exception]] = {"IndexError": IndexError, "RuntimeError": RuntimeError}


class Workspaces:
    """Hands out the memory for intermediate values, and takes it back for the next run.

    One workspace is kept, so that a steady loop allocates nothing; concurrent runs make their own.
    """

    __slots__ = ("keep", "kept", "make")

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.kept: list[Any] = []
        self.keep = config.current().reuse_workspace

    def take(self) -> Any:
        try:
            return self.kept.pop()
        except IndexError:
            return self.make()

    def give(self, space: Any) -> None:
        if self.keep and not self.kept:
            self.kept.append(space)


def overload(name: str) -> Any:
    """The operator overload called `namespace.name.overload`."""
    namespace, op, which = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), which)


def restride(t: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The same values with the strides that the graph was traced with (an eager kernel may choose others)."""
    out = torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device)
    return out.copy_(t)


def out_of_range(number: int, faults: Sequence[tuple[str, str]]) -> None:
    """Raise what the check `number` (from 1) of a kernel says: an exception type and the place of the operator."""
    error, place = faults[number - 1]
    raise _ERRORS[error](f"index out of range in {place}")


__all__ = ["Workspaces", "empty_strided", "out_of_range", "overload", "reinterpret", "restride"]
