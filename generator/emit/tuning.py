"""Reads specs/tuning.yaml, writes generated/tuning.py: the block sizes of Triton kernels, a table for each architecture that was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..check import schema_of
from ..diagnostics import Diagnostics, did_you_mean
from ..load import Document, Entry
from ..model import Model
from ..records import class_name, records
from ..render import header, literal, render

PATH = "generated/tuning.py"
#: What says which kernels a rule is for; all other keys are sizes.
AT_MOST = ("strided", "loads", "bytes", "sums", "points", "row", "buffers", "alignment_groups", "block")
AT_LEAST = ("cost",)
CONDITIONS = (*AT_MOST, *AT_LEAST)
_COUNTS = ("programs", "resident")  # sizes that need not be powers of two
_OF_PRODUCTS = ("odd", "cost", "depth", "elements", "least", "num_stages")  # the same, of products
#: Parts of a table that are sizes of one kind of kernel, and which of these need not be powers of two.
_SIZES = {
    "contraction": ("epilogue", "group_m", "wide_group_m", "num_stages"),
    "attention": ("num_stages",),
    "routine": ("programs",),
}


@dataclass(frozen=True)
class Table:
    """One table: its target, compute capability, what measured it, the rules of each kind of kernel in the order of the file, other sizes of
    some kinds, and what it says of products.
    """

    name: str
    capability: int
    doc: str
    machine: str
    command: str
    rules: dict[str, list[dict[str, Any]]]
    sizes: dict[str, dict[str, int]]
    tiles: list[dict[str, Any]]
    margin: int
    fused: list[dict[str, Any]]
    last: dict[str, Any] | None


def build(doc: Document, model: Model, diags: Diagnostics) -> tuple[Table, ...]:
    """The tables, checked: each is of a GPU, has rules for every kind of kernel and none that is never reached; blocks are powers of two."""
    kinds = [branch["$ref"].rpartition("/")[2] for branch in schema_of("tuning").definition("rule")["oneOf"]]
    targets = model.part("targets", None) or (model.base and model.base.part("targets", None))
    gpus: dict[str, dict[str, Any]] = targets.gpu if targets else {}
    tables = []
    for entry in doc.tagged("tuning"):
        if entry.id not in gpus:
            hint = did_you_mean(entry.id, gpus)
            diags.error(entry.pos("tuning"), f"'{entry.id}' is no GPU of targets.yaml{hint}")
        rules: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for k, rule in enumerate(entry["blocks"]):
            _check_rule(entry, k, diags)
            rules[rule["kernel"]].append({key: value for key, value in rule.items() if key != "kernel"})
        if lacking := [kind for kind, some in rules.items() if not some or set(some[-1]) & set(CONDITIONS)]:
            names = ", ".join(f"'{kind}'" for kind in lacking)
            message = f"tuning '{entry.id}' lacks a last rule without conditions, of kernel {names}"
            diags.error(entry.pos("tuning"), message)
        for part, others in _SIZES.items():
            _check_powers(entry, (part,), entry[part], others, diags)
        for k, tile in enumerate(entry["tiles"]):
            _check_powers(entry, ("tiles", k), tile, ("num_stages", "descriptors"), diags)
        if entry["margin"] >= 100:
            diags.error(
                entry.pos("margin"), f"'margin' is in percent, and must be less than 100, found {entry['margin']}"
            )
        for k in range(len(entry["fused"])):
            _check_fused(entry, k, diags)
        if "last" in entry:
            _check_powers(entry, ("last",), entry["last"], (), diags)
        capability = gpus.get(entry.id, {}).get("capability", 0)
        tables.append(
            Table(
                entry.id,
                capability,
                entry["doc"],
                entry["machine"],
                entry["command"],
                rules,
                {part: entry[part] for part in _SIZES},
                entry["tiles"],
                entry["margin"],
                entry["fused"],
                entry.get("last"),
            )
        )
    return tuple(sorted(tables, key=lambda t: t.capability))


def _check_rule(entry: Entry, k: int, diags: Diagnostics) -> None:
    rule = entry["blocks"][k]
    _check_powers(entry, ("blocks", k), rule, ("kernel", *CONDITIONS, *_COUNTS), diags)
    for before, other in enumerate(entry["blocks"][:k]):
        same = other["kernel"] == rule["kernel"]
        within = all(key in rule and rule[key] <= other[key] for key in AT_MOST if key in other)
        if same and within and all(key in rule and rule[key] >= other[key] for key in AT_LEAST if key in other):
            also = [(entry.pos("blocks", before), "this one holds wherever it would")]
            diags.error(entry.pos("blocks", k), f"this rule for '{rule['kernel']}' is never reached", also=also)
            return


def _check_fused(entry: Entry, k: int, diags: Diagnostics) -> None:
    rule = entry["fused"][k]
    _check_powers(entry, ("fused", k), rule, _OF_PRODUCTS, diags)
    for before, other in enumerate(entry["fused"][:k]):
        most = all(key in rule and rule[key] <= other[key] for key in ("cost", "depth", "elements") if key in other)
        least = all(rule.get(key, 0) >= other.get(key, 0) for key in ("least", "block_m", "block_n"))
        if most and least and rule.get("odd") == other.get("odd"):
            also = [(entry.pos("fused", before), "this one holds wherever it would")]
            diags.error(entry.pos("fused", k), "this rule for products is never reached", also=also)
            return


def _check_powers(
    entry: Entry, path: tuple[str | int, ...], sizes: dict[str, Any], others: tuple[str, ...], diags: Diagnostics
) -> None:
    """All sizes but the others must be powers of two."""
    for key, value in sizes.items():
        if key in others or value & (value - 1) == 0:
            continue
        below = 1 << (value.bit_length() - 1)
        diags.error(
            entry.pos(*path, key),
            f"'{key}' must be a power of two, found {value} (the nearest are {below} and {2 * below})",
        )


def emit(model: Model) -> dict[str, str]:
    """`generated/tuning.py`, or nothing when there is no such spec."""
    tables: tuple[Table, ...] = model.part("tuning")
    if not tables:
        return {}
    head = header(PATH, "specs/tuning/*.yaml")
    schema = schema_of("tuning")
    parts = {part: schema.definition("tuning")["properties"][part] for part in _SIZES}
    made = {part: class_name(reference) for part, reference in parts.items()}
    found = records(schema, parts.values())
    return {
        PATH: render("tuning.py.j2", header=head, tables=tables, records=found, sizes=made, literal=literal),
    }
