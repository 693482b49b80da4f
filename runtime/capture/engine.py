"""Who captures: what the C++ engine is told, and whether a captured backward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..torch_compat.compiled_autograd import engine


@dataclass
class State:
    """running  whether a captured backward runs now.
    off      how many `disable` blocks are entered.
    """

    running: bool = False
    off: int = 0


state = State()


@contextmanager
def capturing(recorder: Callable[[], Any] | None, dynamic: bool = True) -> Iterator[None]:
    """The engine asks `recorder` to capture, or captures nothing for None."""
    before = engine.set_autograd_compiler(recorder, dynamic if recorder is not None else False)
    try:
        yield
    finally:
        engine.set_autograd_compiler(*before)
