"""Who wants to see each compiled graph, and its calls: `opforge.explain`. An ordinary compile asks once for each graph whether there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["Half", "Observer", "observed", "observer"]

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class Half:
    """One functional graph that was compiled: a whole program without gradients, or one half of it, or a branch or body.

    artifacts  what was made of it (`realize.Artifacts`).
    graph      the graph that was lowered.
    names      of the arguments, in order, as the plan has them: buffers and size symbols.
    call       the wrapper's function itself, without what records it as a CUDA graph.
    boxed      it takes one list of its arguments, which it empties.
    recorded   calls are recorded as CUDA graphs, and replayed.
    """

    artifacts: Any
    graph: torch.fx.GraphModule
    names: Sequence[str]
    call: Compiled
    boxed: bool
    recorded: bool


class Observer(Protocol):
    def compiled(self, half: Half, run: Compiled) -> Compiled:
        """One functional graph was compiled, and `run` is to be called for it. Returns what is called instead."""
        ...

    def finished(self, artifacts: Any) -> None:
        """A whole program was compiled (without a backward that is compiled later)."""
        ...


_observers: list[Observer] = []


def observer() -> Observer | None:
    """The one in force. Of the process, not of the thread: autograd may compile a backward in a thread of its own."""
    return _observers[-1] if _observers else None


@contextmanager
def observed(by: Observer) -> Iterator[None]:
    """What is compiled inside is shown to `by`."""
    _observers.append(by)
    try:
        yield
    finally:
        _observers.remove(by)
