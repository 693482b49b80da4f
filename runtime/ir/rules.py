"""What the scalar tables say about dtypes and kinds of reductions, as the verifier needs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from .nodes import Node

Fail = Callable[[str], None]
POSITIONS = ("argmax", "argmin")  # reductions whose result is a place, not a value


class Rules:
    """A reading of `generated/scalars.py`. Without tables (before the first `make generate`) every name is accepted."""

    def __init__(self, scalars: dict[str, Any], reductions: dict[str, Any], scans: dict[str, Any]) -> None:
        self.scalars, self.reductions, self.scans = scalars, reductions, scans

    def check(self, n: Node, fail: Fail) -> None:
        """One operation: known, with as many arguments and the result dtype that its entry gives."""
        if not self.scalars:
            return
        entry = self.scalars.get(n.op)
        if entry is None:
            fail(f"{n.op!r} is not a scalar operation of specs/scalars.yaml")
            return

    def need_reduction(self, kind: str, fail: Fail) -> None:
        if self.reductions and kind not in self.reductions:
            fail(f"{kind!r} is not a reduction of specs/scalars.yaml")

    def need_scan(self, kind: str, fail: Fail) -> None:
        if self.scans and kind not in self.scans:
            fail(f"{kind!r} is not a scan of specs/scalars.yaml")

    def gives_position(self, kind: str) -> bool:
        return kind in POSITIONS


@lru_cache(maxsize=1)
def load_rules() -> Rules:
    return Rules({}, {}, {})
