"""Python's garbage collector while a graph is compiled."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1 << 30
YOUNG = 20_000
"""Objects made until the youngest are looked through: a compile makes millions, nearly all of which die by reference count."""

_lock = threading.Lock()
_running = 0
_before: tuple[int, ...] = ()
_meanwhile = (YOUNG, 10, NEVER)


@contextmanager
def full_collections_deferred() -> Iterator[None]:
    """Let the collector look through young objects only: a graph of thousands of nodes lives until its compile ends, and each full collection
    walks all of it. The first full collection after the last compile frees what has become unreachable.

    A collector that is off stays off, and thresholds that someone else sets meanwhile stay set.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _running, _before
    with _lock:
        _running += 1
        if _running == 1:
            _before = gc.get_threshold()
            if _before[0]:  # 0: someone has switched it off
                gc.set_threshold(*_meanwhile)


def _leave() -> None:
    global _running
    with _lock:
        _running -= 1
        if not _running and gc.get_threshold() == _meanwhile:
            gc.set_threshold(*_before)


__all__ = ["full_collections_deferred"]
