"""Counts for `opforge keys` (uses of each key) and `opforge lines` (lines by folder, hand-written or generated)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .check import schema_of
from .model import Model

SOURCES = frozenset({".py", ".yaml", ".j2", ".h", ".cpp"})
LONGEST = 500
_SKIPPED = frozenset({"build-tmp", "dist", "__pycache__", "results"})
_SKIPPED_AT_ROOT = frozenset({"build"})
_GENERATED = (("generated",), ("tests", "generated"), ("tests", "snapshots"))


def key_usage(model: Model) -> dict[str, dict[str, int]]:
    """Per tag (`op`, `scalar`, …) how many entries use each key that its schema knows, in schema order."""
    usage: dict[str, dict[str, int]] = {}
    for kind, document in sorted(model.documents.items()):
        schema = schema_of(kind)
        for tag in schema.tags():
            if tag == "include":
                continue
            counts = Counter(key for e in document.tagged(tag) for key in e.data)
            usage[tag] = {key: counts[key] for key in _known(schema.definition(tag), schema)}
    return usage


def _known(definition: Mapping[str, Any], schema: Any) -> list[str]:
    branches = [schema.resolve(b) for b in definition.get("oneOf", [definition])]
    return list(dict.fromkeys(key for b in branches for key in b["properties"]))


def line_counts(root: Path) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Lines of the sources below `root` by folder: hand-written, generated; and files over `LONGEST` lines."""
    written: Counter[str] = Counter()
    made: Counter[str] = Counter()
    long = []
    for path in _sources(root, _SKIPPED_AT_ROOT):
        parts = path.relative_to(root).parts
        n = path.read_bytes().count(b"\n")
        deep = 2 if parts[0] in ("runtime", "generator", "tests") and len(parts) > 2 else 1
        folder = "/".join(parts[:deep]) if len(parts) > 1 else "."
        if any(parts[: len(g)] == g for g in _GENERATED):
            made[folder] += n
            continue
        written[folder] += n
        if n > LONGEST:
            long.append(f"{path.relative_to(root).as_posix()}: {n} lines (over {LONGEST})")
    return dict(sorted(written.items())), dict(sorted(made.items())), long


def _sources(folder: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    out = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in _SKIPPED | skipped or path.is_symlink():
            continue
        if path.is_dir():
            out += _sources(path)
        elif path.suffix in SOURCES:
            out.append(path)
    return out
