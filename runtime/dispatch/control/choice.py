"""Higher-order operators that run one of several functions of the program, by a number: recorded as branches within branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....errors import UnsupportedError
from ....generated.decompositions import CHOICES
from ..record.recorder import Recorder
from .functions import Derived, run
from .gradients import call_control


def call_choice(recorder: Recorder, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The call of an operator that the spec names under `choose`. A number too low runs the first function, one too high the last.

    Raises `UnsupportedError` for arguments by name.
    """
    if kwargs:
        raise UnsupportedError(f"{op} with arguments by name{recorder.where()}")
    number, functions, given, branch = CHOICES[op.name()]
    return _chosen(recorder, getattr(torch.ops.higher_order, branch), args[number], args[functions], args[given])


def _chosen(recorder: Recorder, branch: Any, number: Any, functions: Sequence[Any], given: Sequence[Any]) -> Any:
    first, *others = functions
    if not others:
        return run(first, given, recorder)
    if not isinstance(number, torch.Tensor):  # a comparison of sizes is decided now, and becomes a guard
        return run(first, given, recorder) if number <= 0 else _chosen(recorder, branch, number - 1, others, given)

    def one(values: Sequence[Any], within: Recorder) -> Any:
        return run(first, values[1:], within)

    def rest(values: Sequence[Any], within: Recorder) -> Any:
        return _chosen(within, branch, values[0] - 1, others, values[1:])

    return call_control(recorder, branch, (number <= 0, Derived(one), Derived(rest), [number, *given]), {})


__all__ = ["call_choice"]
