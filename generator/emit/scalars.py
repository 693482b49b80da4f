"""Reads specs/scalars.yaml, writes generated/{scalars,complex_scalars,cpp_scalars,triton_scalars}.py: the scalar instruction set."""

from __future__ import annotations

import hashlib
import string
from dataclasses import dataclass, field, replace
from typing import Any

from ..diagnostics import Diagnostics, did_you_mean
from ..load import Document, Entry
from ..model import Model
from ..render import header, literal, render
from . import complex_scalars

SPEC = "specs/scalars.yaml"
KINDS = ("float", "int", "bool")
CLASSES = {
    "float": ("float",),
    "int": ("int",),
    "bool": ("bool",),
    "number": ("float", "int"),
    "integral": ("int", "bool"),
    "any": KINDS,
}
"""Class of dtypes in `args` → kinds of dtypes in it."""


@dataclass(frozen=True)
class ScalarSpec:
    """One scalar operation. `cpp` and `triton` map a kind (or `any`, the default) to a format string (see the spec)."""

    name: str
    doc: str
    args: tuple[str, ...]
    result: str
    torch: str | None
    symbol: str | None
    cpp: dict[str, str]
    triton: dict[str, str]
    commutative: bool
    cost: float
    ulp: float
    domain: tuple[float, float]
    fold: bool
    complex: tuple[str, ...] = ()
    zero_sign: str = "torch"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of dtypes that the first argument takes."""
        return CLASSES[self.args[0]]


@dataclass(frozen=True)
class Accumulation:
    """How a target adds up floats: the dtype of running totals, and what comes before them."""

    total: str
    block: int
    compensated: tuple[str, ...]
    order: str


@dataclass(frozen=True)
class ReductionSpec:
    """One reduction, or one scan (then `horizontal` and `triton` are empty).

    `identity` maps a kind to a number, `lowest` or `highest`.
    """

    name: str
    doc: str
    args: tuple[str, ...]
    result: str
    torch: str | None
    combine: str | None
    identity: dict[str, Any]
    horizontal: str
    triton: str
    exact: bool
    nan: str = ""
    ties: str = ""
    accumulate: dict[str, Accumulation] = field(default_factory=dict)


@dataclass(frozen=True)
class ScalarSet:
    """The whole instruction set, each table by name in file order."""

    scalars: dict[str, ScalarSpec]
    reductions: dict[str, ReductionSpec]
    scans: dict[str, ReductionSpec]
    symbols: dict[str, str]
    digest: str

    @property
    def combining(self) -> dict[str, ReductionSpec]:
        """Reductions, and the scans that no reduction of that name runs."""
        return {**self.reductions, **{k: v for k, v in self.scans.items() if k not in self.reductions}}


def build(doc: Document, model: Model, diags: Diagnostics) -> ScalarSet:
    """The tables, checked: spellings use the arguments there are, symbols are unique, names exist."""
    base: ScalarSet | None = model.base.part("scalars") if model.base else None
    scalars = dict(base.scalars) if base else {}
    reductions = dict(base.reductions) if base else {}
    scans = dict(base.scans) if base else {}
    symbols = dict(base.symbols) if base else {}
    for entry in doc.tagged("scalar"):
        spec = scalars[entry.id] = _scalar(entry, diags)
        if spec.symbol:
            if spec.symbol in symbols:
                diags.error(entry.pos("symbol"), f"'{spec.symbol}' means '{symbols[spec.symbol]}' already")
            symbols[spec.symbol] = spec.name
    for entry in doc.tagged("scalar"):
        spec = scalars[entry.id]
        texts = complex_scalars.check_parts(entry, len(spec.args), scalars, diags)
        scalars[entry.id] = replace(spec, complex=texts)
    for entry in doc.tagged("reduction"):
        reductions[entry.id] = _reduction(entry, scalars, diags)
    for entry in doc.tagged("scan"):
        name = entry.get("reduction")
        if name is None:
            scans[entry.id] = _reduction(entry, scalars, diags)
        elif name not in reductions:
            diags.error(
                entry.pos("reduction"), f"expected a reduction, found '{name}'{did_you_mean(name, list(reductions))}"
            )
        else:
            r = reductions[name]
            scans[entry.id] = replace(
                _reduction(entry, scalars, diags), combine=r.combine, identity=r.identity, exact=r.exact
            )
    _check_accumulation(doc, reductions, scans, diags)
    text = repr([e.data for e in doc]) + (base.digest if base else "")
    return ScalarSet(scalars, reductions, scans, symbols, hashlib.sha256(text.encode()).hexdigest()[:16])


def _scalar(entry: Entry, diags: Diagnostics) -> ScalarSpec:
    args = tuple(entry["args"])
    for target in ("cpp", "triton"):
        spelled = entry[target]
        for kind, text in spelled.items() if isinstance(spelled, dict) else (("", spelled),):
            pos = entry.pos(target, kind) if kind else entry.pos(target)
            _check_format(text, len(args), pos, diags, "TAL" if (target, kind) == ("triton", "row") else "TA")
    if args[0] == "same":
        diags.error(entry.pos("args", 0), "the first argument has no argument before it to be the same as")
        args = ("any", *args[1:])
    return ScalarSpec(
        name=entry.id,
        doc=entry["doc"],
        args=args,
        result=entry["result"],
        torch=entry["torch"],
        symbol=entry.get("symbol"),
        cpp=_by_kind(entry["cpp"]),
        triton=_by_kind(entry["triton"]),
        commutative=entry.get("commutative", False),
        cost=entry["cost"],
        ulp=entry["ulp"],
        domain=tuple(entry.get("domain", (-10, 10))),
        fold=entry.get("fold", True),
        zero_sign=entry.get("zero_sign", "torch"),
    )


def _by_kind(spelled: str | dict[str, str]) -> dict[str, str]:
    return {"any": spelled} if isinstance(spelled, str) else dict(spelled)


def _check_format(text: str, arity: int, pos: Any, diags: Diagnostics, names: str = "TA") -> None:
    known = [*(str(i) for i in range(arity)), *names]
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
    except ValueError as error:
        diags.error(pos, f"expected a format string, found {text!r}: {error}")
        return
    for name in fields:
        if name not in known:
            diags.error(
                pos, f"expected one of {', '.join('{' + k + '}' for k in known)} in a spelling, found '{{{name}}}'"
            )


def _reduction(entry: Entry, scalars: dict[str, ScalarSpec], diags: Diagnostics) -> ReductionSpec:
    combine = entry.get("combine")
    if combine is not None and combine not in scalars:
        diags.error(entry.pos("combine"), f"expected a scalar, found '{combine}'{did_you_mean(combine, list(scalars))}")
        combine = None
    return ReductionSpec(
        name=entry.id,
        doc=entry["doc"],
        args=tuple(entry["args"]),
        result=entry.get("result", "same"),
        torch=entry["torch"],
        combine=combine,
        identity=dict(entry.get("identity") or {}),
        horizontal=entry.get("horizontal", ""),
        triton=entry.get("triton", ""),
        exact=entry.get("exact", True),
        nan=entry.get("nan", ""),
        ties=entry.get("ties", ""),
        accumulate={
            target: Accumulation(a["total"], a.get("block", 0), tuple(a.get("compensated", ())), a["order"])
            for target, a in (entry.get("accumulate") or {}).items()
        },
    )


def _check_accumulation(
    doc: Document, reductions: dict[str, ReductionSpec], scans: dict[str, ReductionSpec], diags: Diagnostics
) -> None:
    """What is not exact says how it is added up; one block size for all, since one loop serves all sums of a kernel."""
    blocks = {r.name: r.accumulate["cpp"].block for r in reductions.values() if r.accumulate}
    first = next(iter(blocks), "")
    for entry in (*doc.tagged("reduction"), *doc.tagged("scan")):
        spec = (reductions if entry.tag == "reduction" else scans).get(entry.id)
        if spec is None:
            continue
        if not spec.exact and not spec.accumulate:
            diags.error(entry.pos(entry.tag), f"'{entry.id}' is not exact: expected `accumulate`, how it is added up")
        if entry.tag == "reduction" and spec.accumulate and blocks[spec.name] != max(blocks[first], 2):
            found, wanted = blocks[spec.name], f"expected the block of '{first}', {max(blocks[first], 2)}"
            at = entry.pos("accumulate", "cpp", "block") if found else entry.pos("accumulate", "cpp")
            diags.error(at, f"{wanted}, found {found}" if found else f"{wanted}: the loops add up by blocks")


def cpp_identity(spec: ReductionSpec) -> str:
    """The identity element as C++ over {T}, right for every dtype that the reduction takes."""
    value = next(iter(spec.identity.values()))
    if value == float("-inf"):
        return "lowest_of<{T}>()"
    if value == float("inf"):
        return "highest_of<{T}>()"
    return f"{{T}}({int(value)})"


def emit(model: Model) -> dict[str, str]:
    """The four tables, or nothing when there is no scalar spec."""
    part: ScalarSet | None = model.part("scalars", None)
    if part is None:
        return {}
    listed = [(s.name, len(s.args), s.complex) for s in part.scalars.values()]
    out = {complex_scalars.PATH: complex_scalars.text_of(listed)}
    for name in ("scalars", "cpp_scalars", "triton_scalars"):
        path = f"generated/{name}.py"
        text = render(f"{name}.py.j2", header=header(path, SPEC), part=part, literal=literal, cpp_identity=cpp_identity)
        out[path] = text
    return out
