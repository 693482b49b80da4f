"""Runs a rewrite rule's generated test on wrong variants of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opforge.generator.diagnostics import Diagnostics
from opforge.generator.emit.rewrites import PATH, RuleSpec, emit
from opforge.generator.load import Document, Entry
from opforge.generator.model import Model
from opforge.generator.run import build_model
from opforge.runtime.graph.patterns import Rule
from tests.support.rewrite_check import check_rule

from .ops import NotCompilable


@dataclass
class RuleTests:
    """The generated test of one rule."""

    entry: Entry
    base: Model

    def __post_init__(self) -> None:
        self.text, rule, self.hints = self._built(self.entry)
        check_rule(rule, self.hints)

    def _built(self, entry: Entry) -> tuple[str, Rule, dict[str, Any]]:
        diags = Diagnostics()
        document = Document(entry.source.name, entry.source, (entry,), (entry.source,))
        try:
            model = build_model(self.base.specs, {"rewrites": document}, self.base.torch, diags, self.base)
            if diags.mistakes:
                raise NotCompilable(diags.mistakes[0].message)
            spec: RuleSpec = model.part("rewrites")[0]
            text = emit(model)[PATH]
            namespace: dict[str, Any] = {"__name__": "opforge.generated.mutant", "__package__": "opforge.generated"}
            exec(compile(text, "<mutant>", "exec"), namespace)
        except NotCompilable:
            raise
        except Exception as error:
            raise NotCompilable(f"{type(error).__name__}: {error}") from error
        return text, namespace[spec.name], spec.test

    def killed_by(self, mutant: Entry) -> str | None:
        """What the test says, None where it passes. Raises NotCompilable."""
        text, rule, hints = self._built(mutant)
        if text == self.text:
            raise NotCompilable("the generated rule is the same")
        try:
            check_rule(rule, hints)
        except Exception as error:  # noqa: BLE001 - a test fails by anything that is raised
            return f"{type(error).__name__}: {error}"
        return None
