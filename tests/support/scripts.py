"""The scripts of benchmarks/, which import each other by name, as tests import them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Scripts can be imported inside of the block, and are forgotten after it."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
                del sys.modules[name]
