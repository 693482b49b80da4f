"""Runs a captured backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..torch_compat.compiled_autograd import compile_context, dynamo_runs_captured, numbered
from .calls import carried
from .switch import capturing, state


@dataclass(frozen=True)
class Captured:
    """What the engine calls for each backward with the compiled graph and its arguments.

    number  of the capture.
    sizes   positions of those sizes that the graph takes.
    checks  what is searched for nan afterwards: "gradients" of the leaves, "results", or nothing ("").
    leaves  positions of the inputs that get gradients.
    """

    number: int
    sizes: tuple[int, ...]
    checks: str = ""
    leaves: tuple[int, ...] = ()

    def __call__(
        self,
        compiled: Callable[..., Any],
        inputs: list[torch.Tensor],
        sizes: Sequence[int],
        scalars: Sequence[Any],
        hooks: Sequence[Any],
        packed: Sequence[Any],
    ) -> Any:
        taken = [carried(sizes[k]) for k in self.sizes]
        leaves = [inputs[k] for k in self.leaves] if self.checks == "gradients" else []
        with capturing(None), dynamo_runs_captured(), _running(), compile_context(numbered(self.number)):
            found = compiled(inputs, taken, scalars, hooks, packed)
        if self.checks:
            _refuse_nan([leaf.grad for leaf in leaves] if leaves else found)
        return found


@contextmanager
def _running() -> Iterator[None]:
    before, state.running = state.running, True
    try:
        yield
    finally:
        state.running = before


def _refuse_nan(gradients: Collection[torch.Tensor | None]) -> None:
    """Raises RuntimeError as anomaly mode does, once the backward has run: within a compiled graph there are no places to look at."""
    for k, g in enumerate(gradients):
        if g is not None and g.is_floating_point() and bool(torch.isnan(g).any()):
            raise RuntimeError(
                f"anomaly mode: gradient {k} of a captured backward has nan; without compiled autograd torch names the operator"
            )
