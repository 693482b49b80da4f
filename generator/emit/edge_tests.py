"""Reads specs/ops.yaml and what it includes, writes tests/generated/test_edges.py: operators at the edges of their dtypes against eager."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from ..model import Model
from ..op_entries import OpEntry, Section
from ..render import header, render
from .scalars import ScalarSet

PATH = "tests/generated/test_edges.py"
_VALUED = ("pointwise", "reduction", "scan")
_ORDERING = "sorting."
"""The file of the routines that compare elements."""
AT_ONCE = 16
"""Entries whose cases are compiled as one graph."""
SAMPLED = 12
"""Of so many entries one is run by Triton's interpreter too."""


def emit(model: Model) -> dict[str, str]:
    """The test file, or nothing when there is no operator spec."""
    entries: tuple[OpEntry, ...] = tuple(e for e in model.part("ops") if e.lowerings)
    if not entries or model.base is not None:
        return {}
    scalars: ScalarSet = model.part("scalars")
    by_overload = {w.schema.id: e for e in entries for w in e.lowerings}
    tested = [e for e in entries if e.kind in _VALUED or _compares(e, scalars, by_overload)]
    groups: dict[str, list[str]] = {}
    for e in sorted(tested, key=lambda e: (e.family, e.id)):
        if e.no_edges or e.unspecified:
            continue
        found = [name for name in groups if name.partition(" ")[0] == e.family]
        if not found or len(groups[found[-1]]) == AT_ONCE:
            found.append(f"{e.family} {len(found) + 1}" if found else e.family)
        groups.setdefault(found[-1], []).append(e.id)
    either = [e.id for e in tested if _either_zero(e, scalars, by_overload)]
    untested = {e.id: e.no_edges for e in tested if e.no_edges}
    sample = [name for ids in groups.values() for name in ids][::SAMPLED]
    text = render(
        "test_edges.py.j2",
        header=header(PATH, "specs/ops.yaml"),
        groups=groups,
        either=either,
        untested=untested,
        sample=sample,
    )
    return {PATH: text}


def _compares(e: OpEntry, scalars: ScalarSet, by_overload: Mapping[str, OpEntry]) -> bool:
    """Whether a composite orders elements: by a routine, or by reductions of which none adds up."""
    if e.kind != "composite":
        return False
    texts = {
        n.value for s in _sections(e) for n in s.nodes() if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }
    kinds = list(_reductions(e, by_overload))
    return any(t.startswith(_ORDERING) for t in texts) or (
        bool(kinds) and all(scalars.reductions[k].exact for k in kinds)
    )


def _reductions(e: OpEntry, by_overload: Mapping[str, OpEntry]) -> Iterator[str]:
    """The reductions of an entry and of what it calls. (The checks let none call itself.)"""
    for lowering in e.lowerings:
        if "reduce" in lowering.words:
            yield lowering.words["reduce"]
    for name in _called(e):
        if name in by_overload and name not in {w.schema.id for w in e.lowerings}:
            yield from _reductions(by_overload[name], by_overload)


def _either_zero(e: OpEntry, scalars: ScalarSet, by_overload: Mapping[str, OpEntry]) -> bool:
    """Whether a zero in the result may come from a reduction for which zeros of both signs are alike. (Of operators on single elements torch's
    own two results tell.)
    """
    combines = {scalars.reductions[kind].combine for kind in _reductions(e, by_overload) if kind in scalars.reductions}
    return any(name is not None and scalars.scalars[name].zero_sign == "either" for name in combines)


def _sections(e: OpEntry) -> Iterator[Section]:
    for lowering in e.lowerings:
        yield from lowering.every_section()


def _called(e: OpEntry) -> Iterator[str]:
    """The overloads that a composite calls."""
    for section in _sections(e):
        yield from (printed.overload for printed in section.resolved.values() if printed.overload)
