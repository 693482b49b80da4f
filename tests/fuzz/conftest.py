"""Quick builds for the fuzzer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .check import quick_builds


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of prepared headers and compiled kernels of the session."""
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture
def quick(prepared: Path) -> Iterator[None]:
    """Quick builds in force for one test: tests of other folders, which run later in the same process, keep their settings."""
    with quick_builds(prepared):
        yield
