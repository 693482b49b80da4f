"""Checks where the results of an operator's calls lie: what tracing foretells beside eager, for arguments in many layouts."""

from __future__ import annotations

from typing import Any

import torch

from opforge.errors import UnsupportedError
from opforge.runtime.dispatch.trace import trace
from opforge.testing.op_check import _REJECTED, Case, Op, _cases

from .layouts import in_other_layouts, tensors_of

Place = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]


def place(t: torch.Tensor) -> Place:
    return t.dtype, tuple(t.shape), t.stride(), t.storage_offset()


def places(result: Any) -> list[Place]:
    return [place(t) for t in tensors_of(result)]


def first_case(op: Op, overload: str) -> Case | None:
    torch.manual_seed(0)
    return next((c for c in _cases(op, overload) if "empty" not in c.label), None)


def differences(case: Case) -> list[str]:
    """Layouts that tracing foretells wrongly, which is where compiled results get theirs from."""
    found = []
    for label, (args, kwargs) in in_other_layouts(case.args, case.kwargs):
        try:
            expected = places(case.call(args, kwargs))
        except _REJECTED:
            continue
        told: list[list[Place]] = []

        def program(args: list[Any], kwargs: dict[str, Any], told: list[list[Place]] = told) -> Any:
            result = case.call(args, kwargs)
            told.append(places(result))
            return tensors_of(result)

        try:
            trace(program, [args, kwargs])
        except UnsupportedError:  # it runs eagerly
            continue
        if told[-1] != expected:
            given = [(list(t.shape), t.stride()) for t in tensors_of([args, kwargs])]
            found.append(f"{case.overload} ({label}) of {given}: {told[-1]}, eager {expected}")
    return found


def is_registered(overload: str) -> bool:
    """Whether this version of torch has the overload."""
    namespace, packet, name = overload.split(".")
    return hasattr(getattr(getattr(torch.ops, namespace), packet, None), name)
