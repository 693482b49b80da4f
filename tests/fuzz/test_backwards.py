"""Random backwards with hooks, captured (`backwards.py` tries more)."""

import pytest

from . import backwards


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_captured_backwards_are_eagers(first: int) -> None:
    found = {seed: text for seed in range(first, first + 25) if (text := backwards.difference(seed))}
    assert not found


@pytest.mark.parametrize("seed", range(3))
def test_compiled_backwards_are_eagers(seed: int) -> None:
    assert not backwards.difference(seed, compiled=True)
