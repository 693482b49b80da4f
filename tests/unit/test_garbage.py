"""Full collections wait while graphs are compiled, and what a user has set comes back."""

import gc
from collections.abc import Iterator

import pytest

from opforge.runtime.garbage import NEVER, full_collections_deferred


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_come_back_after_the_last_compile() -> None:
    gc.set_threshold(701, 11, 12)
    with full_collections_deferred():
        with full_collections_deferred():
            assert gc.get_threshold()[2] == NEVER
        assert gc.get_threshold()[2] == NEVER
    assert gc.get_threshold() == (701, 11, 12)


def test_thresholds_come_back_after_an_exception() -> None:
    gc.set_threshold(701, 11, 12)
    with pytest.raises(RuntimeError), full_collections_deferred():
        raise RuntimeError
    assert gc.get_threshold() == (701, 11, 12)


def test_a_collector_that_is_switched_off_stays_off() -> None:
    gc.set_threshold(0)
    with full_collections_deferred():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0


def test_thresholds_set_meanwhile_stay() -> None:
    with full_collections_deferred():
        gc.set_threshold(800, 9, 8)
    assert gc.get_threshold() == (800, 9, 8)
