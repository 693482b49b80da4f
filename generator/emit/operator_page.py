"""Reads specs/ops.yaml and what it includes, makes the page docs/operators.md: every operator of torch with its row."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ..coverage import NAMESPACES, counts
from ..devices import GPU, PROCESSOR, native_on, updates_left
from ..model import Model
from ..op_entries import WITHOUT_LOWERING, OpEntry, Section
from ..render import cell, header, render
from .kernels import gpu_routines
from .scalars import ReductionSpec, ScalarSet

SPEC = "specs/ops.yaml"
_DEVICES = {"C++": PROCESSOR, "Triton": GPU}
"""Target → the device that it is for, but for its routines."""
_OWN = tuple(f"{namespace}." for namespace in NAMESPACES)
_NAN = {"passes": "passes on", "first": "the first one's position", "": ""}
_EXACT_KINDS = ("view", "gather", "create", "scatter")


def operators_page(model: Model, path: str) -> str:
    """The text of the page."""
    entries: tuple[OpEntry, ...] = tuple(sorted(model.part("ops"), key=lambda e: (e.family, e.id)))
    kinds = {s.id: e.kind for e in entries for s in e.schemas}
    devices = _DEVICES | {"Triton": replace(GPU, routines=gpu_routines(model))}
    native = {target: native_on(device, entries) for target, device in devices.items()}
    rows = [_row(e, model.part("scalars"), native) for e in entries if e.lowerings]
    others = {kind: [_other(e) for e in entries if e.kind == kind] for kind in WITHOUT_LOWERING}
    found = counts(model.torch, kinds) if not model.base else {}
    return render(
        "operators.md.j2",
        header=header(path, SPEC),
        entries=sorted(Counter(e.kind for e in entries).items()),
        namespaces=NAMESPACES,
        counts=found,
        native={target: sum(name.startswith(_OWN) for name in names) for target, names in native.items()},
        rows=rows,
        accumulation=_accumulation(model.part("scalars")),
        others=others,
    )


def _row(e: OpEntry, scalars: ScalarSet, native: Mapping[str, frozenset[str]]) -> dict[str, str]:
    conditions = {w.sections["native_if"].text for w in e.lowerings if "native_if" in w.sections}
    required = list(dict.fromkeys(section.text for w in e.lowerings for section in w.required))
    said = [cell(clause.says) for clause in e.require if clause.says]
    return {
        "id": e.id,
        "kind": e.kind,
        "targets": ", ".join(_targets(e, native)),
        "dtypes": ", ".join(e.test_dtypes) or "eager's",
        "where": _conditions(sorted(conditions)),
        "requires": " · ".join(filter(None, [_conditions(required), *said])),
        "tests": "shapes" if e.unspecified else f"{len(e.tests)} written" if e.tests else "by schema",
        "numerics": _numerics(e, scalars),
        "doc": cell(e.doc),
    }


def _targets(e: OpEntry, native: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """The targets on which one of an entry's overloads is native, with the updates that one leaves."""
    for target, names in native.items():
        left = " or ".join(sorted(updates_left(_DEVICES[target], e)))
        if any(s.id in names for s in e.schemas):
            yield f"{target} ({left})" if left else target


def _conditions(texts: Iterable[str]) -> str:
    return " · ".join(f"`{cell(' '.join(c.split()))}`" for c in texts)


def _other(e: OpEntry) -> dict[str, str]:
    return {"id": ", ".join(f"`{name}`" for name in e.id.split(", ")), "doc": cell(e.doc), "why": cell(e.why)}


def _numerics(e: OpEntry, scalars: ScalarSet) -> str:
    """What an entry's expressions say of accuracy: the scalars whose results are not the nearest number, and the order of sums."""
    if e.kind == "composite":
        return "as what it calls"
    used = {name for section in _sections(e) for name in section.called if name in scalars.scalars}
    wide = sorted(((scalars.scalars[n].ulp, n) for n in used if scalars.scalars[n].ulp > 0.5), reverse=True)
    parts = [f"{n} {u:g} ulp" for u, n in wide[:3]]
    for table, key in ((scalars.reductions, "reduce"), (scalars.scans, "scan")):
        words = {w for lowering in e.lowerings for k, w in lowering.words.items() if k == key}
        parts += [
            f"{word}: {_totals(table[word])}" for word in sorted(words) if word in table and table[word].accumulate
        ]
    compute = {lowering.words.get("compute", "") for lowering in e.lowerings} - {""}
    parts += [f"computed in {c}" if c != "same" else "in its own dtype" for c in sorted(compute)]
    if parts:
        return ", ".join(parts)
    return "exact" if e.kind in _EXACT_KINDS or not any(map(_arithmetic, _sections(e))) else "rounded at each step"


_TARGET_NAMES = {"cpp": "C++", "triton": "Triton"}


def _totals(r: ReductionSpec) -> str:
    """The dtype of a reduction's running totals on each target, in short."""
    parts = []
    for target, a in r.accumulate.items():
        total = "own dtype" if a.total == "same" else a.total
        parts.append(f"{total}{f' after {a.block} steps' if a.block else ''} ({_TARGET_NAMES[target]})")
    return ", ".join(parts)


def _accumulation(scalars: ScalarSet) -> list[dict[str, str]]:
    """Rows of the table of reductions and scans: one for each target of those whose order shows, one for each other."""
    found = []
    for kind, table in (("reduction", scalars.reductions), ("scan", scalars.scans)):
        for r in table.values():
            row = {"id": f"{kind} `{r.name}`", "nan": _NAN[r.nan], "ties": "the first" if r.ties else ""}
            if not r.accumulate:
                found.append(row | {"target": "both", "total": "own dtype", "order": "does not show"})
            for target, a in r.accumulate.items():
                total = "own dtype" if a.total == "same" else a.total
                total += f", {', '.join(a.compensated)} compensated" if a.compensated else ""
                order = f"blocks of {a.block}: {a.order}" if a.block else a.order
                found.append(row | {"target": _TARGET_NAMES[target], "total": total, "order": cell(order)})
    return found


def _sections(e: OpEntry) -> Iterator[Section]:
    for lowering in e.lowerings:
        yield from (lowering.sections[k] for k in ("at", "finish", "when") if k in lowering.sections)
        yield from (section for _, section in lowering.withs)
        yield from (section for _, section in lowering.cases)


def _arithmetic(section: Section) -> bool:
    return any(isinstance(n, ast.BinOp) for n in section.nodes())
