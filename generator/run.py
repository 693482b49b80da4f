"""One run of the generator: load → check → build → emit → write. `SPECS` and `EMITTERS` say what there is.

A new spec kind is a line in `SPECS`; a new output is a line in `EMITTERS`. Only `write_tree` touches the disk.
"""

from __future__ import annotations

import difflib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import SpecError
from . import check_ops
from .check import check_document, check_tag
from .diagnostics import Diagnostics, did_you_mean
from .emit import (
    config,
    decompositions,
    docs,
    edge_tests,
    hooks,
    invalid_tests,
    kernels,
    languages,
    linear,
    lowerings,
    matrix,
    mutations,
    op_tests,
    options,
    random,
    recompute,
    rewrites,
    scalar_tests,
    scalars,
    targets,
    tuning,
)
from .load import Document, load_spec
from .model import Emit, Model, SpecKind
from .render import header
from .torch_schemas import TorchSchemas

ROOT = Path(__file__).resolve().parent.parent
SPECS_DIR = ROOT / "specs"
LINE_LENGTH = 120

SPECS: tuple[SpecKind, ...] = (
    SpecKind("languages", ("language",), languages.build),
    SpecKind("targets", ("target",), targets.build),
    SpecKind("config", ("setting",), config.build, needs=("targets",)),
    SpecKind("options", ("options", "mode"), options.build, needs=("config",)),
    SpecKind("tuning", ("tuning",), tuning.build, needs=("targets",)),
    SpecKind("scalars", ("scalar", "reduction", "scan"), scalars.build),
    SpecKind("polynomials", ("polynomial",)),
    SpecKind("kernels", ("kernel",), needs=("scalars", "targets")),
    SpecKind("ops", ("op",), check_ops.build, needs=("scalars",)),
    SpecKind("recompute", ("recompute",), recompute.build, needs=("ops",)),
    SpecKind("linear", ("linear",), linear.build),
    SpecKind(
        "decompositions",
        (
            "decomposition",
            "correction",
            "refusal",
            "unfold",
            "inline",
            "launch",
            "control",
            "choose",
            "custom_gradient",
            "spare",
        ),
        decompositions.build,
    ),
    SpecKind("random", ("random",), random.build),
    SpecKind("rewrites", ("rule",), rewrites.build),
    SpecKind("mutations", ("enum", "struct", "table", "step", "role", "inverse"), mutations.build),
    SpecKind("matrix", ("axis", "matrix"), matrix.build),
    SpecKind("hooks", ("hook", "place", "graph", "backward", "cells"), hooks.build),
)
"""In dependency order: a builder sees the parts of the kinds above it."""

EMITTERS: dict[str, Emit] = {
    "config": config.emit,
    "options": options.emit,
    "languages": languages.emit,
    "targets": targets.emit,
    "tuning": tuning.emit,
    "scalars": scalars.emit,
    "scalar_tests": scalar_tests.emit,
    "kernels": kernels.emit,
    "lowerings": lowerings.emit,
    "op_tests": op_tests.emit,
    "invalid_tests": invalid_tests.emit,
    "edge_tests": edge_tests.emit,
    "recompute": recompute.emit,
    "linear": linear.emit,
    "random": random.emit,
    "rewrites": rewrites.emit,
    "mutations": mutations.emit,
    "decompositions": decompositions.emit,
    "matrix": matrix.emit,
    "hooks": hooks.emit,
    "docs": docs.emit,
}
"""Name (for `--only`) → emitter. Each returns path → text; no two may write the same path."""

OWNED = ("generated", "tests/generated")
"""Folders that belong to the generator: files in them that no emitter wrote are removed."""


@dataclass(frozen=True)
class Change:
    """One file that a run would write (`new`), rewrite, or remove (`new is None`). `path` is relative to the output
    root.
    """

    path: str
    old: str | None
    new: str | None

    def diff(self) -> str:
        """Unified diff, old against new."""
        old, new = (self.old or "").splitlines(keepends=True), (self.new or "").splitlines(keepends=True)
        return "".join(difflib.unified_diff(old, new, f"a/{self.path}", f"b/{self.path}"))


def kind_of_tag(tag: str) -> SpecKind | None:
    """The kind whose entries begin with the key `tag`."""
    return next((k for k in SPECS if tag in k.tags), None)


def load_model(specs: Path = SPECS_DIR, torch: TorchSchemas | None = None) -> Model:
    """Load and check all spec files below `specs` and build the model. Raises `SpecError` that holds every mistake."""
    diags = Diagnostics()
    documents = {}
    for kind in SPECS:
        if (specs / kind.file).exists():
            documents[kind.name] = load_spec(specs / kind.file, diags, name=f"{specs.name}/{kind.file}")
    model = build_model(specs, documents, torch or TorchSchemas.snapshot(), diags)
    diags.raise_if_any()
    return model


def own_entries(path: Path) -> int:
    """Check opforge's own specs, all of them, and count the entries of those that stand in the file or folder `path`.

    Raises `SpecError` with every mistake, or when `path` is none of the spec files.
    """
    model = load_model()
    if path == SPECS_DIR:
        return model.size
    names = {source.name for d in model.documents.values() for source in d.sources}
    wanted = f"{SPECS_DIR.name}/{path.relative_to(SPECS_DIR).as_posix()}"
    if wanted not in names and not any(name.startswith(wanted + "/") for name in names):
        raise SpecError(f"{wanted} is none of the spec files{did_you_mean(wanted, names)}")
    roots = {d.name for d in model.documents.values()} & {wanted}
    entries = [(d.name, e.source.name) for d in model.documents.values() for e in d]
    return sum(root in roots or name == wanted or name.startswith(wanted + "/") for root, name in entries)


def load_user_model(path: Path, base: Model) -> Model:
    """As `load_model`, for one file of the user's own (entries of any kind) on top of `base`."""
    diags = Diagnostics()
    doc = load_spec(path, diags)
    documents = {}
    for kind in SPECS:
        if entries := tuple(e for e in doc if e.tag in kind.tags):
            documents[kind.name] = replace(doc, entries=entries)
    tags = [tag for kind in SPECS for tag in kind.tags]
    for entry in doc:
        if entry.tag not in tags:
            check_tag(entry, tags, diags)
    model = build_model(base.specs, documents, base.torch, diags, base)
    diags.raise_if_any()
    return model


def build_model(
    specs: Path, documents: Mapping[str, Document], torch: TorchSchemas, diags: Diagnostics, base: Model | None = None
) -> Model:
    """Check every document by its schema, then build the parts; entries that a schema rejects are left out of their
    part.
    """
    good, broken = {}, {}
    for kind in SPECS:
        if kind.name in documents:
            doc = documents[kind.name]
            bad = check_document(doc, kind.name, kind.tags, diags)
            good[kind.name] = replace(doc, entries=tuple(e for e in doc if e not in bad))
            broken[kind.name] = bad
    model = Model(specs, good, {}, torch, base, broken)
    for kind in SPECS:
        # A part built from an incomplete one would only repeat its mistakes.
        if kind.name not in good or any(broken.get(n) or (n in good and n not in model.parts) for n in kind.needs):
            continue
        with warnings.catch_warnings():
            # Python's parser warns of odd literals and spacing (`1if x`) in an expression; they are mistakes or right, never warnings.
            for category in (SyntaxWarning, DeprecationWarning):
                warnings.filterwarnings("ignore", category=category, module="<unknown>")
            part = kind.build(good[kind.name], model, diags) if kind.build else good[kind.name].entries
        model = replace(model, parts={**model.parts, kind.name: part})
    return model


def emit_all(model: Model, only: Collection[str] = ()) -> dict[str, str]:
    """Run the emitters (all, or those named) and collect path → text, sorted by path."""
    for name in only:
        if name not in EMITTERS:
            raise SpecError(f"no emitter '{name}' (there are {', '.join(EMITTERS)}){did_you_mean(name, EMITTERS)}")
    files: dict[str, str] = {}
    if not only:
        path = "generated/__init__.py"
        files[path] = header(path, "specs/") + '"""What the generator made of specs/; every file names its spec."""\n'
    for name, emit in EMITTERS.items():
        if only and name not in only:
            continue
        for path, text in emit(model).items():
            if path in files:
                raise RuntimeError(f"emitter '{name}' writes {path}, which another emitter writes too")
            files[path] = text
    return dict(sorted(files.items()))


def plan_changes(files: Mapping[str, str], root: Path, owned: Iterable[str]) -> list[Change]:
    """Compare `files` with what lies below `root`; files in `owned` folders that are not in `files` are to be
    removed.
    """
    changes = []
    for path, text in files.items():
        target = root / path
        old = target.read_bytes().decode("utf-8", "replace") if target.is_file() else None
        if old != text:
            changes.append(Change(path, old, text))
    for folder in owned:
        for stale in sorted(p for p in (root / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts):
            path = stale.relative_to(root).as_posix()
            if path not in files:
                changes.append(Change(path, stale.read_bytes().decode("utf-8", "replace"), None))
    return changes


def format_files(files: Mapping[str, str]) -> dict[str, str]:
    """Format the Python files with ruff (isolated, line length 120) in a temporary folder. Raises `SpecError` if ruff
    refuses.
    """
    python = [p for p in files if p.endswith(".py")]
    if not python:
        return dict(files)
    with tempfile.TemporaryDirectory(prefix="opforge-generate-") as tmp:
        for path in python:
            target = Path(tmp, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files[path].encode())
        style = ["--line-length", str(LINE_LENGTH), "--target-version", "py311"]
        command = [_ruff(), "format", "--isolated", "--no-cache", "--quiet", *style, "."]
        done = subprocess.run(command, cwd=tmp, capture_output=True, text=True, encoding="utf-8")
        if done.returncode:
            raise SpecError(f"generated Python is not valid (a bug of an emitter):\n{done.stderr.strip()}")
        return {p: Path(tmp, p).read_bytes().decode() if p in python else text for p, text in files.items()}


def format_module(text: str) -> str:
    """A module of a user's operators, formatted where ruff is installed: only readers need it."""
    return format_files({"module.py": text})["module.py"] if _find_ruff() else text


def _ruff() -> str:
    found = _find_ruff()
    if not found:
        raise SpecError("the generator needs ruff to format what it writes: pip install ruff")
    return found


def _find_ruff() -> str | None:
    beside = Path(sys.executable).with_name("ruff")
    return str(beside) if beside.exists() else shutil.which("ruff")


def write_tree(changes: Iterable[Change], root: Path) -> None:
    """Apply `changes`: all new texts are staged beside the target first, then renamed into place, each atomically.

    Signals that would end the process wait until the renames are done, so an interrupted run leaves the old tree or
    the new one.
    """
    staged: list[tuple[Path, Path]] = []
    root.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=".opforge-stage-", dir=root))
    try:
        changes = list(changes)
        for number, change in enumerate(changes):
            if change.new is not None:
                temporary = stage / str(number)
                temporary.write_bytes(change.new.encode())
                staged.append((temporary, root / change.path))
        ending = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} if hasattr(signal, "SIGHUP") else set()
        if ending:
            signal.pthread_sigmask(signal.SIG_BLOCK, ending)
        try:
            for temporary, target in staged:
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(temporary, target)
            for change in changes:
                if change.new is None:
                    (root / change.path).unlink(missing_ok=True)
                    _remove_empty((root / change.path).parent, root)
        finally:
            if ending:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _remove_empty(folder: Path, root: Path) -> None:
    while folder != root and folder.is_dir() and all(p.name == "__pycache__" for p in folder.iterdir()):
        shutil.rmtree(folder)
        folder = folder.parent


def generate(*, only: Collection[str] = (), root: Path = ROOT, specs: Path | None = None) -> list[Change]:
    """The changes that would bring `root` up to date with its specs (nothing is written). Raises `SpecError`."""
    model = load_model(specs or root / "specs")
    files = format_files(emit_all(model, only))
    return plan_changes(files, root, () if only else OWNED)
