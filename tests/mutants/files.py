"""Runs test files on wrong variants of specs whose generated modules every import of opforge reads: tables, decompositions, random operators."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from opforge.generator.diagnostics import Diagnostics
from opforge.generator.emit import decompositions, mutations, random
from opforge.generator.load import Entry
from opforge.generator.model import Emit, Model
from opforge.generator.run import build_model
from opforge.generator.tables import build_table, combinations

from .ops import NotCompilable

ROOT = Path(__file__).resolve().parents[2]
EMITTERS: Mapping[str, Emit] = {
    "mutations": mutations.emit,
    "decompositions": decompositions.emit,
    "random": random.emit,
}
TESTS: Mapping[str, tuple[str, ...]] = {
    "mutations": (
        "tests/unit/dispatch",
        "tests/snapshots/test_wrappers.py",
        "tests/generated/test_matrix.py::test_sample",
        "tests/programs/test_mutation.py",
    ),
    "decompositions": (
        "tests/programs/test_composites_of_symbols.py",
        "tests/programs/test_results_as_eager_has_them.py",
        "tests/programs/test_layouts_of_results.py",
        "tests/programs/test_refused_dtypes.py",
        "tests/programs/test_refused_sizes.py",
        "tests/programs/test_boolean_refusals.py",
        "tests/programs/test_attention_masks.py",
        "tests/programs/test_symbolic_slices.py",
        "tests/programs/test_symbolic_views.py",
        "tests/programs/test_higher_order.py",
        "tests/programs/test_control.py",
        "tests/programs/test_user_kernels.py",
        "tests/unit/dispatch",
    ),
    "random": ("tests/programs/test_random.py",),
}
"""Tests of each kind, in the order in which they run: the quick ones first."""
LIMIT_S = 600
"""Seconds for the tests of one mutant."""


@dataclass
class FileTests:
    """The test files of the kind of an entry, run in a process that imports the variant's modules."""

    kind: str
    entry: Entry
    base: Model

    def __post_init__(self) -> None:
        self.texts = self._texts(self.entry)

    def _texts(self, entry: Entry | None) -> dict[str, str]:
        """The generated modules, with `entry` in the place of the right one; None: without it."""
        document = self.base.documents[self.kind]
        places = {e.id + e.tag: e for e in document}
        entries = tuple(
            e if key != self.entry.id + self.entry.tag else entry
            for key, e in places.items()
            if entry is not None or key != self.entry.id + self.entry.tag
        )
        diags = Diagnostics()
        try:
            given = {self.kind: replace(document, entries=entries)}
            model = build_model(self.base.specs, given, self.base.torch, diags, self.base)  # type: ignore[arg-type]
            if diags.mistakes:
                raise NotCompilable(diags.mistakes[0].message)
            texts = EMITTERS[self.kind](model)
            for path, text in texts.items():
                compile(text, path, "exec")
        except NotCompilable:
            raise
        except Exception as error:
            raise NotCompilable(f"{type(error).__name__}: {error}") from error
        return texts

    def killed_by(self, mutant: Entry | None) -> str | None:
        """What the first failing test says, None where all pass. Raises NotCompilable."""
        texts = self._texts(mutant)
        if texts == self.texts:
            raise NotCompilable("the generated modules are the same")
        if (
            mutant is not None
            and mutant.tag == "table"
            and _results(mutant, self.base) == _results(self.entry, self.base)
        ):
            raise NotCompilable("the table says the same of every combination that there is")
        said = _run_on(texts, TESTS[self.kind])
        if said is not None and said.startswith("FAILED "):
            test = said.removeprefix("FAILED ").partition(" - ")[0]
            if _run_on(self.texts, (test,)) is not None:
                raise RuntimeError(f"{test} fails for the right specs too")
        return said


def _results(table: Entry, base: Model) -> list[object]:
    """What a decision table says of each combination of its predicates; None for a combination that cannot occur."""
    enums = {e.id: tuple(e["members"]) for e in base.documents["mutations"].tagged("enum")}
    steps = tuple(e.id for e in base.documents["mutations"].tagged("step"))
    built = build_table(table, enums, steps, Diagnostics())
    assert built is not None, "the generator has taken it"
    domains = {name: (False, True) if kind == "bool" else enums[kind] for name, kind in built.over.items()}
    return [
        None
        if any(condition.holds(c) for condition, _ in built.impossible)
        else next(rule.then for rule in built.rules if rule.when.holds(c))
        for c in combinations(domains)
    ]


def _run_on(texts: Mapping[str, str], tests: tuple[str, ...]) -> str | None:
    with tempfile.TemporaryDirectory(prefix="opforge-mutant-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for path, text in texts.items():
            (folder / Path(path).name).write_text(text)
        return run_tests(tests, folder)


def run_tests(tests: tuple[str, ...], folder: Path) -> str | None:
    """Run tests while the modules in `folder` stand in for those of `generated/`; the first failure, None where there is none in time."""
    environment = {**os.environ, "OPFORGE_CACHE_DIR": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tests.mutants.substitute", str(folder), *tests]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return None  # slow machines must not make kills
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else f"exit status {done.returncode}: {(done.stdout + done.stderr)[-160:]}"
