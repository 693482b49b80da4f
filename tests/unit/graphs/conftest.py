"""What all tests of recordings check: uses that are counted in one go are those that are counted block by block."""

from __future__ import annotations

import pytest

from opforge.runtime.graphs.memory import Results


@pytest.fixture(autouse=True)
def uses_are_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = Results.uses

    def checked(self: Results) -> list[int]:
        found = at_once(self)
        assert found == [b.uses() for b in self.blocks]
        return found

    monkeypatch.setattr(Results, "uses", checked)
