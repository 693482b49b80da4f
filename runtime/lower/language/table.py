"""The table of lowerings: names of functions, whose modules are imported when one of them is first used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple


class OpInfo(NamedTuple):
    """What a spec entry says of itself: kind, one line of documentation, spec file, and the overloads that it covers."""

    kind: str
    doc: str
    family: str
    overloads: tuple[str, ...]


class Lowerings(Mapping[str, Callable[..., Any]]):
    """Overload (`aten.add.Tensor`) → lowering function. `where` maps to `module:function`, with modules below `package`."""

    def __init__(self, package: str, where: Mapping[str, str]) -> None:
        self._package, self._where = package, dict(where)
        self._found: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, overload: str) -> Callable[..., Any]:
        found = self._found.get(overload)
        if found is None:
            module, _, name = self._where[overload].partition(":")
            found = self._found[overload] = getattr(import_module(f".{module}", self._package), name)
        return found

    def __contains__(self, overload: object) -> bool:
        return overload in self._where or overload in self._found

    def __iter__(self) -> Iterator[str]:
        return iter({**self._where, **self._found})

    def __len__(self) -> int:
        return len({**self._where, **self._found})

    def add(self, overload: str, function: Callable[..., Any]) -> None:
        """Register a lowering (of a user's operator); it replaces one that is there."""
        self._found[overload] = function
