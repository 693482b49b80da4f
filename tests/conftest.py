"""Settings of the whole test-suite: a cache of its own, plans verified, Dynamo's state fresh for every test."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Two workers share the cores: a thread that waits must sleep, not spin. Read by OpenMP when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Every plan and every loop-IR program that a test makes is checked by the independent checkers.
os.environ.setdefault("OPFORGE_DEBUG_VERIFY", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """One empty kernel cache for a test session, shared by its workers; removed at the end by the first process."""
    if "OPFORGE_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="opforge-test-cache-", ignore_cleanup_errors=True)
        os.environ["OPFORGE_CACHE_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)
    if "OPFORGE_TEST_LANES" in os.environ:
        from tests.support.lanes import set_lanes

        set_lanes()
    try:
        from hypothesis import settings
    except ImportError:
        return
    # Derandomized: a red run is red again. `--hypothesis-seed` explores.
    settings.register_profile("opforge", deadline=None, derandomize=True, max_examples=60)
    settings.load_profile("opforge")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped without a CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="C8: no CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How the cells of the matrix of mutations and aliases came out, over all its tests."""
    counts: dict[str, int] = {}
    for report in (r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)):
        for name, found in report.user_properties:
            if name == "matrix" and isinstance(found, dict):
                counts |= {k: counts.get(k, 0) + n for k, n in found.items()}
    if counts:
        parts = ", ".join(f"{n} {k}" for k, n in sorted(counts.items(), key=lambda item: -item[1]))
        terminalreporter.write_line(f"matrix of mutations and aliases: {sum(counts.values())} cells: {parts}")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """After a test that used torch: no compiled frames, counters or seeds remain for the next."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


@pytest.fixture
def fresh_stats() -> None:
    """`opforge.stats()` begins at zero."""
    import opforge

    opforge.reset_stats()


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT
