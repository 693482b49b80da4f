"""Mistakes of opforge's own are told apart from what programs do: they are not a quiet reason to run eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opforge.errors import OpforgeWarning, UnsupportedError
from opforge.runtime.config import patch
from opforge.runtime.dispatch.record import writes
from opforge.runtime.dispatch.trace import trace


def program(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + 1


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "functional_arguments", lambda *_: ())


def test_a_mistake_goes_through_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        trace(program, [torch.ones(3)])


def test_a_mistake_is_warned_of_and_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with patch(debug_verify=False), torch.no_grad(), pytest.warns(OpforgeWarning, match="internal error"):
        assert torch.compile(program, backend="opforge")(torch.ones(3)).tolist() == [3.0] * 3


@pytest.mark.parametrize("error", [TypeError, IndexError, AssertionError, ValueError, RuntimeError])
def test_errors_of_the_program_are_left_to_eager(error: type[Exception]) -> None:
    def raises(x: Any) -> Any:
        raise error("of the program")

    with pytest.raises(UnsupportedError, match=f"{error.__name__} while tracing: of the program"):
        trace(raises, [torch.ones(3)])


def test_a_resized_storage_is_seen() -> None:
    def shrinks(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        x.untyped_storage().resize_(0)
        return y

    with pytest.raises(UnsupportedError, match="the storage of input 0 is resized"):
        trace(shrinks, [torch.ones(3)])
