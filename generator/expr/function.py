"""The printed function that expressions are parts of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from keyword import iskeyword

from .ops import Names
from .types import Type

Scope = Mapping[str, Type]
"""The variables that an expression may name, with their types."""

LOCALS = ("b", "s", "p", "i", "r", "out", "value")
"""Names of the printed functions themselves: builder, scalars, operands, coordinates, result shape, reduced value."""


@dataclass
class Function:
    """What all expressions of one printed function share.

    bound       every name bound anywhere in it (arguments, lets, targets): such names hide imported helpers
    arguments   those that are parameters: they keep their names
    imports     helper name → name that it is imported as
    """

    names: Names
    arguments: frozenset[str]
    bound: frozenset[str]
    imports: dict[str, str] = field(default_factory=dict)
    uses_scalars: bool = False
    calls: set[str] = field(default_factory=set)
    """The overloads of operators that it calls."""

    def local(self, name: str) -> str:
        """How a name of the function's own (`b`, `p`, …) prints: beside an argument of that name it steps aside."""
        return f"{name}_" if name in self.arguments else name

    def printed(self, name: str) -> str:
        """How a variable of the spec prints."""
        return f"{name}_" if iskeyword(name) or (name in LOCALS and name not in self.arguments) else name

    def imported(self, name: str) -> str:
        """How a helper of `names.py` prints."""
        return self.imports.setdefault(name, f"{name}_of" if name in self.bound else name)

    def scalar(self, name: str) -> str:
        """How a scalar prints."""
        self.uses_scalars = True
        return f"{self.local('s')}.{name}_" if iskeyword(name) else f"{self.local('s')}.{name}"
