"""`opforge test my_ops.yaml`: the tests that opforge's own entries have, for the operators of a user's spec file."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import opforge

from ..errors import SpecError
from ..generated.ops import LOWERINGS
from ..generator.ahead import check_user_file
from ..generator.op_entries import OpEntry
from .gradients import check_gradients
from .op_check import Case, Op, check_cases, exists, wrong_fakes


@dataclass
class Tested:
    """What came of the tests of one entry. `gradients` counts the calls whose gradients were compared."""

    id: str
    cases: int = 0
    gradients: int = 0
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


def check_file(
    path: Path,
    imports: Sequence[str] = (),
    references: Mapping[str, str] | None = None,
    entries: Sequence[str] = (),
) -> Iterator[Tested]:
    """Test every operator of a spec file (or only the `entries` named), one after another: values, gradients, and that loops are made.

    imports     modules that register the operators; found as `opforge check` finds them.
    references  operator → `module:function`, which computes the right results; without one the operator's own eager kernel does.
    Raises `SpecError` with every mistake of the file, for a reference that cannot be imported, and for a name that the file does not have.
    """
    model = check_user_file(path, imports)
    found: tuple[OpEntry, ...] = tuple(e for e in model.part("ops") if e.lowerings)
    functions = {name: _function(text, path) for name, text in (references or {}).items()}
    known = {e.id: e for e in found}
    for name in (*entries, *functions):
        if name not in known:
            raise SpecError(
                f"{path}: no operator '{name}' that loops are made for (there are {', '.join(known) or 'none'})"
            )
    opforge.load_specs(path)
    for entry in found:
        if not entries or entry.id in entries:
            yield _tested(entry, functions.get(entry.id))


def _tested(entry: OpEntry, reference: Callable[..., Any] | None) -> Tested:
    overloads = tuple(w.schema.id for w in entry.lowerings)
    op = Op(
        entry.id,
        entry.kind,
        overloads,
        entry.tests,
        entry.test_dtypes,
        values=not entry.unspecified,
        complex_=entry.complex,
        reference=reference,
    )
    start = time.monotonic()
    tested = Tested(entry.id)
    missing = [o for o in overloads if not exists(o)]
    if missing:
        tested.faults.append(
            f"torch has no operator {', '.join(missing)}: name the module that registers it with --import"
        )
        return tested
    assert all(o in LOWERINGS for o in overloads)
    tested.faults, misled = wrong_fakes(op)  # whatever else these cases show comes from that
    with opforge.config.patch({"debug.verify": True, "progress": "off"}):
        try:
            cases, faults = check_cases(op, misled)
        except AssertionError as error:
            tested.faults.append(str(error))
            return tested
        tested.cases = len(cases)
        tested.faults += faults
        for case in _differentiable(cases):
            found = check_gradients(case)
            tested.gradients += found is not None
            tested.faults += found or []
    tested.seconds = time.monotonic() - start
    return tested


def _differentiable(cases: Sequence[Case]) -> Iterator[Case]:
    """Of each overload the calls in float32 and float64 with elements: one of each set of parameters."""
    seen: set[tuple[str, str]] = set()
    for case in cases:
        tensors = [v for v in (*case.args, *case.kwargs.values()) if isinstance(v, torch.Tensor)]
        floats = [t for t in tensors if t.dtype in (torch.float32, torch.float64)]
        others = {k: v for k, v in case.kwargs.items() if not isinstance(v, torch.Tensor)}
        plain = [v for v in case.args if not isinstance(v, torch.Tensor)]
        key = (case.overload, repr((sorted(others.items()), plain, [str(t.dtype) for t in tensors])))
        if floats and all(t.numel() for t in tensors) and key not in seen:
            seen.add(key)
            yield case


def _function(text: str, path: Path) -> Callable[..., Any]:
    """The function of `module:name`; the module is looked for in the current folder and beside the spec file too."""
    if not re.fullmatch(r"[\w.]+:\w+", text):
        raise SpecError(f"expected --reference operator=module:function, found '{text}' after the '='")
    module, _, name = text.partition(":")
    folders = list(dict.fromkeys([str(Path.cwd()), str(path.resolve().parent)]))
    sys.path[:0] = folders
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SpecError(f"cannot import the reference '{text}': {error}") from error
    finally:
        for folder in folders:
            sys.path.remove(folder)
    if not callable(found):
        raise SpecError(f"the reference '{text}' is no function")
    result: Callable[..., Any] = found
    return result


__all__ = ["Tested", "check_file"]
