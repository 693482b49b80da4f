"""Runs a captured backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..torch_compat import skip_frame, unseen_by_dynamo
from ..torch_compat.compiled_autograd import compile_context, dynamo_runs_captured, engine_as_seen, numbered
from .calls import carried
from .engine import capturing, state
from .orders import Orders


@dataclass(frozen=True)
class Captured:
    """What the engine calls for each backward with the compiled graph and its arguments.

    number  of the capture.
    sizes   positions of those sizes that the graph takes.
    checks  what is searched for nan afterwards: "gradients" of the leaves, "results", or nothing ("").
    leaves  positions of the inputs that get gradients.
    orders  its graphs for other orders, if code of the program runs in it.
    """

    number: int
    sizes: tuple[int, ...]
    checks: str = ""
    leaves: tuple[int, ...] = ()
    orders: Orders | None = None

    def __call__(
        self,
        compiled: Callable[..., Any],
        inputs: list[torch.Tensor],
        sizes: Sequence[int],
        scalars: Sequence[Any],
        hooks: Sequence[Any],
        packed: Sequence[Any],
    ) -> Any:
        leaves = [inputs[k] for k in self.leaves] if self.checks == "gradients" else []
        with (
            unseen_by_dynamo(),
            capturing(None),
            dynamo_runs_captured(),
            _running() as callbacks,
            compile_context(numbered(self.number)),
        ):
            if self.orders is not None:
                compiled = self.orders.fitting(compiled)
            taken = [carried(sizes[k]) for k in self.sizes]
            found = compiled(inputs, taken, scalars, hooks, packed)
            for callback in callbacks:  # it may queue more
                callback()
            if self.checks:
                _refuse_nan([leaf.grad for leaf in leaves] if leaves else found)
        return found


skip_frame(Captured.__call__)


class Engine:
    """Stands for torch's engine while a captured backward runs: what the program queues for the end of the backward runs behind the graph. The C++
    engine, which runs nothing itself now, would forget it.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.callbacks: list[Callable[[], None]] = []

    def queue_callback(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@contextmanager
def _running() -> Iterator[list[Callable[[], None]]]:
    """A captured backward runs. Gives the list of what is queued for its end."""
    before, state.running = state.running, True
    try:
        with engine_as_seen(Engine) as ours:
            yield ours.callbacks
    finally:
        state.running = before


def _refuse_nan(gradients: Collection[torch.Tensor | None]) -> None:
    """Raises RuntimeError as anomaly mode does, once the backward has run: within a compiled graph there are no places to look at."""
    for k, g in enumerate(gradients):
        if g is not None and g.is_floating_point() and bool(torch.isnan(g).any()):
            raise RuntimeError(
                f"anomaly mode: gradient {k} of a captured backward has nan; without compiled autograd torch names the operator"
            )
