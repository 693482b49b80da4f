"""How a compiled function that autograd follows is run once more by eager kernels, with tangents of forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    return tuple((d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d))


@dataclass(frozen=True)
class Again:
    """What is run once more.

    program   takes the inputs, flat, and returns what it did.
    sources   for each input the graph's argument that has it.
    moved     inputs with a tangent → the graph's argument that has that.
    held      arguments that the program holds itself.
    results   results of the program that move, flat, each with the position of the graph's result.
    written   arguments that the program writes.
    autocast  devices on which autocast is on, with its dtype.
    """

    program: Callable[..., Any]
    sources: tuple[int, ...]
    moved: Mapping[int, int]
    held: tuple[int, ...]
    results: tuple[tuple[int, int], ...]
    written: frozenset[int]
    autocast: tuple[tuple[str, torch.dtype], ...] = field(default_factory=_autocast)

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """The context in which the program ran."""
        with ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield
