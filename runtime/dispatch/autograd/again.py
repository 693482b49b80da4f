"""How a compiled function that autograd follows is run once more by eager kernels, with tangents of forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..surroundings import Surroundings


@dataclass(frozen=True)
class Again:
    """What is run once more.

    program   takes the inputs, flat, and returns what it did.
    sources   for each input the graph's argument that has it.
    moved     inputs with a tangent → the graph's argument that has that.
    held      arguments that the program holds itself.
    results   results of the program that move, flat, each with the position of the graph's result.
    written   arguments that the program writes.
    surroundings  those in which the program was traced.
    """

    program: Callable[..., Any]
    sources: tuple[int, ...]
    moved: Mapping[int, int]
    held: tuple[int, ...]
    results: tuple[tuple[int, int], ...]
    written: frozenset[int]
    surroundings: Surroundings = field(default_factory=Surroundings)
