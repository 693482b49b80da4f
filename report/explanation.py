"""What `opforge.explain` returns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..runtime.observe import counters
from ..runtime.observe.calls import observed
from ..runtime.realize import Artifacts
from ..runtime.torch_compat import graph_breaks
from .collect import Call, Collector

__all__ = ["Explanation", "explained", "until_then"]


@dataclass
class Explanation:
    """What was compiled for one call, or by one program.

    `str()` is a summary that is read in ten seconds, `details()` all texts, `html(path)` a page. Their times are measured when the first of them is
    asked for: each graph is called again, with copies of the arguments of its first call.
    """

    result: Any
    graphs: list[Artifacts]
    fallbacks: dict[str, int]
    """Reason → number of graphs that ran eagerly for it."""
    reasons: dict[str, int] = field(default_factory=dict)
    """"operator: reason" → number of library calls that were made for it."""
    breaks: dict[str, int] = field(default_factory=dict)
    """Why Dynamo split the program into several graphs → how often."""
    error: str = ""
    """What the program raised."""
    title: str = ""
    calls: list[Call] = field(default_factory=list, repr=False)
    _report: dict[str, Any] | None = field(default=None, repr=False)

    def report(self) -> dict[str, Any]:
        """The data of summary and page (`report/data.py`)."""
        if self._report is None:
            from .data import report

            self._report = report(self, title=self.title)
            for call in self.calls:
                call.given = None  # memory that nobody needs any more
        return self._report

    def __str__(self) -> str:
        from .summary import summary_text

        return summary_text(self.report())

    def details(self) -> str:
        """The texts of each graph: loop IR, kernels, wrapper."""
        from .summary import details_text

        return details_text(self)

    def html(self, path: str | os.PathLike[str]) -> Path:
        """Write one page that needs no other file and no network; returns its path."""
        from .page import write_page

        return write_page(self.report(), Path(path))


@contextmanager
def explained(title: str = "", measure: bool = True) -> Iterator[Explanation]:
    """What is compiled inside is in the explanation when the block ends, however it ends."""
    by = Collector(measure)
    said = Explanation(None, by.graphs, {}, title=title, calls=by.calls)
    before, breaks = counters.snapshot(), graph_breaks()
    try:
        with observed(by):
            yield said
    finally:
        now = counters.snapshot()
        said.fallbacks = _more(now["fallbacks"], before["fallbacks"])
        said.reasons = _more(now["reasons"], before["reasons"])
        said.breaks = _more(graph_breaks(), breaks)


def until_then(said: Explanation) -> str:
    """What was compiled before the program raised, without times."""
    from .data import report
    from .summary import summary_text

    try:
        return "opforge compiled until then:\n" + summary_text(report(said, times=False))
    except Exception as error:  # noqa: BLE001 - the program's own error must not be lost for it
        return f"opforge compiled {len(said.graphs)} graphs until then, and cannot say more: {type(error).__name__}: {error}"


def _more(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: n - before.get(name, 0) for name, n in now.items() if n > before.get(name, 0)}
