"""Runs the generated tests of a scalar on wrong variants of its spellings (C++, and Triton by the interpreter) and of its complex form."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from opforge.generated import complex_scalars
from opforge.generated.scalars import SCALARS
from opforge.generator.diagnostics import Diagnostics
from opforge.generator.emit.scalars import emit
from opforge.generator.load import Entry
from opforge.generator.model import Model
from opforge.generator.run import build_model
from tests.support import scalars as support

from .ops import NotCompilable

PATHS = {name: f"generated/{name}.py" for name in ("scalars", "cpp_scalars", "triton_scalars", "complex_scalars")}
FLAGS = ("-march=native", "-w")


@dataclass
class ScalarTests:
    """The generated tests of one scalar."""

    entry: Entry
    base: Model

    def __post_init__(self) -> None:
        self.texts = self._texts(self.entry)
        assert self.killed_by(self.entry, may_be_same=True) is None

    def _texts(self, entry: Entry) -> dict[str, str]:
        document = self.base.documents["scalars"]
        entries = tuple(entry if (e.tag, e.id) == (self.entry.tag, self.entry.id) else e for e in document)
        diags = Diagnostics()
        try:
            given = {"scalars": replace(document, entries=entries)}
            model = build_model(self.base.specs, given, self.base.torch, diags)
            if diags.mistakes:
                raise NotCompilable(diags.mistakes[0].message)
            return emit(model)
        except NotCompilable:
            raise
        except Exception as error:
            raise NotCompilable(f"{type(error).__name__}: {error}") from error

    def killed_by(self, mutant: Entry, may_be_same: bool = False) -> str | None:
        """What the first failing test says, None where all pass. Raises NotCompilable."""
        name, texts = self.entry.id, self._texts(mutant)
        changed = {key for key, path in PATHS.items() if texts[path] != self.texts[path]}
        if not changed and not may_be_same:
            raise NotCompilable("the generated tables are the same")
        changed = changed or {*PATHS}
        spaces = {key: _namespace(key, texts[PATHS[key]]) for key in PATHS}
        with _installed(name, spaces), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                if "complex_scalars" in changed and name in complex_scalars.COMPLEX:
                    support.check_complex(name)
                if changed & {"scalars", "cpp_scalars"}:
                    support.check_declared(name)
                    support.check_cpp(support.compile_cpp(Path(folder), FLAGS, names=(name,)), name)
                if "triton_scalars" in changed:
                    results = torch.load(support.run_triton(Path(folder), "cpu", names=(name,)))
                    support.check_triton(results, name)
            except Exception as error:  # noqa: BLE001 - a test fails by anything that is raised
                return f"{type(error).__name__}: {error}"
        return None


def _namespace(name: str, text: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": f"opforge.generated.{name}", "__package__": "opforge.generated"}
    exec(compile(text, f"<{name}>", "exec"), space)
    return space


@contextmanager
def _installed(name: str, spaces: dict[str, dict[str, Any]]) -> Iterator[None]:
    """The variant's spellings and its complex form stand in the tables that the tests read."""
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = [
        (SCALARS, spaces["scalars"]["SCALARS"]),
        (support.CPP, spaces["cpp_scalars"]["CPP"]),
        (support.CPP_KIND, spaces["cpp_scalars"]["CPP_KIND"]),
        (support.TRITON, spaces["triton_scalars"]["TRITON"]),
        (support.TRITON_KIND, spaces["triton_scalars"]["TRITON_KIND"]),
        (complex_scalars.COMPLEX, spaces["complex_scalars"]["COMPLEX"]),
    ]
    before = [dict(table) for table, _ in tables]
    support.cases.cache_clear()
    try:
        for table, new in tables:
            table.clear()
            table.update(new)
        yield
    finally:
        for (table, _), old in zip(tables, before, strict=True):
            table.clear()
            table.update(old)
        support.cases.cache_clear()
