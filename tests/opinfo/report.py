"""What a run of many cases adds up to: tables for people, JSON for machines."""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .check import generic
from .database import Case, entries
from .listed import known

FAILED = ("crash", "hang", "wrong", "error")
COLUMNS = ("native", "eager", "raises", "error", "wrong", "hang", "crash")


@dataclass
class Summary:
    """The reports of a run."""

    reports: list[dict[str, Any]] = field(default_factory=list)

    def add(self, report: dict[str, Any]) -> None:
        """One case's report, as a worker made it."""
        self.reports.append(report)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Reports of cases that failed and are not listed as known to."""
        return [r for r in self.reports if r["outcome"] in FAILED and not known(Case(**r["case"]))]

    def counts(self, key: Callable[[dict[str, Any]], str]) -> dict[str, Counter[str]]:
        """Outcomes of the cases by a key of theirs."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for r in self.reports:
            found[key(r)][r["outcome"]] += 1
        return dict(sorted(found.items()))

    def why(self) -> list[tuple[str, int]]:
        """Why cases have operators that run by eager kernels, with the number of cases, most frequent first."""
        counted: Counter[str] = Counter()
        for r in self.reports:
            counted.update({generic(reason) for reason in r["why"]})
        return counted.most_common()

    def write(self, path: Path, seconds: float) -> None:
        """All of it as JSON."""
        totals = Counter(r["outcome"] for r in self.reports)
        found = {
            "torch": torch.__version__,
            "seconds": round(seconds),
            "cases": len(self.reports),
            "outcomes": dict(totals),
            "calls": dict(sum((Counter(r["calls"]) for r in self.reports), Counter())),
            "eager": dict(self.why()),
            "reports": self.reports,
        }
        path.write_text(json.dumps(found, indent=1))


def keep(path: Path, report: dict[str, Any]) -> None:
    """Add a report to a file of them, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(report) + "\n")


def kept(path: Path) -> list[dict[str, Any]]:
    """The reports of such a file, none where there is none. Of a line that was cut off the case runs again."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def show(summary: Summary, console: Console, seconds: float, rows: int = 200) -> None:
    """Print the tables: failures first, then why eager kernels ran, then the counts."""
    _show_failures(summary, console, rows)
    for r in summary.reports:
        if r["problem"]:
            console.print(f"no samples: {Case(**r['case'])}: {r['problem']}", highlight=False, soft_wrap=True)
    reasons = Table(title="why cases have operators by eager kernels", title_justify="left")
    reasons.add_column("cases", justify="right")
    reasons.add_column("operator: reason")
    for reason, n in summary.why()[:40]:
        reasons.add_row(str(n), reason)
    console.print(reasons)
    for name, key in (
        ("kind", lambda r: entries()[r["case"]["entry"]].kind),
        ("dtype", lambda r: r["case"]["dtype"]),
        ("variant", lambda r: r["case"]["variant"] + (" dynamic" if r["case"]["dynamic"] else "")),
    ):
        console.print(_counted(name, summary.counts(key)))
    calls = sum((Counter(r["calls"]) for r in summary.reports), Counter())
    console.print(
        f"{len(summary.reports)} cases, {sum(calls.values())} calls in {seconds:.0f} s with torch {torch.__version__}: {line(summary)}; "
        f"{len(summary.failures)} failures that are not listed",
        highlight=False,
        soft_wrap=True,
    )


def line(summary: Summary) -> str:
    """Shares of the cases, in one line."""
    totals = Counter(r["outcome"] for r in summary.reports)
    held = sum(totals[c] for c in COLUMNS)
    passed = held - sum(totals[c] for c in FAILED)
    computed = max(held - totals["raises"], 1)
    parts = [f"{passed / max(held, 1):.2%} pass", f"{totals['native'] / computed:.1%} native"]
    parts += [f"{totals[c]} {c}" for c in (*COLUMNS, "none") if totals[c]]
    return ", ".join(parts)


def _counted(name: str, counts: dict[str, Counter[str]]) -> Table:
    table = Table(title=f"cases by {name}", title_justify="left")
    table.add_column(name)
    for column in ("cases", "pass", *COLUMNS, "no samples"):
        table.add_column(column, justify="right")
    for key, found in counts.items():
        held = sum(found[c] for c in COLUMNS)
        passed = held - sum(found[c] for c in FAILED)
        share = f"{passed / held:.1%}" if held else "-"
        table.add_row(key, str(held), share, *(str(found[c] or "") for c in COLUMNS), str(found["none"] or ""))
    return table


def _show_failures(summary: Summary, console: Console, rows: int) -> None:
    failures: Sequence[dict[str, Any]] = sorted(
        (r for r in summary.reports if r["outcome"] in FAILED),
        key=lambda r: (FAILED.index(r["outcome"]), str(Case(**r["case"]))),
    )
    if not failures:
        return
    table = Table(title="cases that fail", title_justify="left", show_lines=False)
    for column in ("outcome", "case", "calls", "sample", "what differs"):
        table.add_column(column, overflow="fold")
    for r in failures[:rows]:
        case = Case(**r["case"])
        first = r["failures"][0]
        text = "; ".join(f"{kind}: {t}" for kind, t in first["different"])[:260]
        listed = known(case)
        table.add_row(
            r["outcome"] + (" (listed)" if listed else ""),
            str(case),
            f"{len(r['failures'])} of {max(sum(r['calls'].values()), 1)}",
            f"{first['number']}: {first['label']}"[:120],
            text,
        )
    console.print(table)
    if len(failures) > rows:
        console.print(f"and {len(failures) - rows} more")
