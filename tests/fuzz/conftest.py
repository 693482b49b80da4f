"""Quick builds for the fuzzer's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .check import quick_builds


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of prepared headers and compiled kernels for the session."""
    with quick_builds(tmp_path_factory.mktemp("fuzz")):
        yield
