"""What came of the mutants: a file of results that a later run goes on from, the table by spec file, and the page of survivors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

REASONS = Path(__file__).with_name("survivors.yaml")
"""Why mutants survive that no test can or should kill."""
UNKNOWN = "not yet looked into"
STATUSES = ("killed", "survived", "refused", "error")


@dataclass
class Results:
    """Reports of mutants by key, in the order in which they came; `path` gets each new one."""

    path: Path
    reports: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, forget_survivors: bool = False) -> Results:
        """The results that the file has; a line that was cut off is left out."""
        found: dict[str, dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                report = json.loads(line)
            except ValueError:
                continue
            found[report["key"]] = report
        kept = [r for r in found.values() if not (forget_survivors and r["status"] == "survived")]
        return cls(path, kept)

    @property
    def done(self) -> set[str]:
        """Keys of mutants that need not be run again."""
        return {r["key"] for r in self.reports if "key" in r}

    def add(self, report: dict[str, Any]) -> None:
        """Keep a report; that an entry's own tests do not run is shown, but not kept."""
        self.reports.append(report)
        if "key" in report:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(report) + "\n")

    def of(self, files: Collection[str], entries: Collection[str]) -> list[dict[str, Any]]:
        """The reports of some files and entries (none given: of all)."""
        return [
            r
            for r in self.reports
            if (not files or r.get("file") in files) and (not entries or r.get("entry") in entries)
        ]

    def summary(self) -> str:
        """Counts on one line."""
        counts = Counter(r["status"] for r in self.reports)
        return ", ".join(f"{counts[s]} {s}" for s in STATUSES if counts[s])

    def write_page(self, page: Path, total: int) -> None:
        """The table and the survivors with their reasons; `total` is how many mutants there are."""
        page.write_text(page_text(self.reports, total))


def table(reports: Sequence[dict[str, Any]]) -> str:
    """Counts by spec file."""
    counts: dict[str, Counter[str]] = {}
    for r in reports:
        if "file" in r:
            counts.setdefault(r["file"], Counter())[r["status"]] += 1
    lines = [f"{'spec file':34} {'killed':>7} {'survived':>9} {'refused':>8} {'share killed':>13}"]
    for file, c in [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]:
        lines.append(f"{file:34} {c['killed']:7} {c['survived']:9} {c['refused']:8} {_share(c):>13}")
    return "\n".join(lines)


def _share(c: Counter[str]) -> str:
    run = c["killed"] + c["survived"]
    return f"{c['killed'] / run:.1%}" if run else "-"


def reason_of(report: dict[str, Any], reasons: Sequence[dict[str, Any]]) -> str:
    """The reason of the first clause of `survivors.yaml` that fits, or "not yet looked into"."""
    for clause in reasons:
        if all(_has(str(report.get(k, "")), v) for k, v in clause["of"].items()):
            return str(clause["reason"])
    return UNKNOWN


def _has(text: str, wanted: str | list[str]) -> bool:
    return any(str(w) in text for w in (wanted if isinstance(wanted, list) else [wanted]))


def page_text(reports: Sequence[dict[str, Any]], total: int) -> str:
    """The page `docs/mutants.md`. `total`: how many mutants there are, of which a sample may have been run."""
    reasons = yaml.safe_load(REASONS.read_text()) or []
    by_reason: dict[str, list[dict[str, Any]]] = {}
    for r in reports:
        if r["status"] == "survived":
            by_reason.setdefault(reason_of(r, reasons), []).append(r)
    lines = [
        "# Mutants of the specs",
        "",
        "Written by `make mutants` (`python -m tests.mutants --write`). A mutant is a wrong variant of the specs: in one expression an operator, an",
        "argument, a constant or a condition is exchanged or dropped, a rule of a decision table has another result, or an entry is missing. It is",
        "killed if a test fails. The generator refuses some itself, or makes the same code of them: these are not counted.",
        "",
        "| specs | tests that a mutant runs |",
        "|---|---|",
        "| operators | the generated cases of its entry, by the interpreter of loop programs; those with a routine are compiled |",
        "| rewrites | the generated test of the rule |",
        "| scalars | the generated test of the scalar: C++, Triton's interpreter, the complex form |",
        "| decision tables, inverses of views, decompositions, random operators | test files, listed in `tests/mutants/files.py` |",
        "",
        "Not covered: templates of reductions and scans, kernels, tuning and settings. How to run it, with a sample or an entry alone:",
        "[`fuzzing.md`](fuzzing.md#mutants-of-the-specs).",
        "",
        "| spec file | killed | survived | refused | share killed |",
        "|---|---|---|---|---|",
    ]
    for row in table(reports).splitlines()[1:]:
        name, *numbers = row.split()
        lines.append(f"| {name} | {' | '.join(numbers)} |")
    known = sum(len(found) for reason, found in by_reason.items() if reason != UNKNOWN)
    killed = sum(r["status"] == "killed" for r in reports)
    survived = sum(map(len, by_reason.values()))
    lines += [
        "",
        f"{len(reports)} of {total} mutants were run. {known} of the {survived} survivors have a reason; without these, "
        f"{killed / max(1, killed + survived - known):.1%} are killed.",
        "",
        "A sample that was worked on says little of the others: where entries were changed, their mutants of before are gone, and reasons match by "
        "text, some of them too much. A new seed in an empty results file is the measure.",
        "",
        "## Survivors",
    ]
    for reason, found in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        lines += ["", f"### {reason} ({len(found)})"]
        lines += [f"- `{r['file']}` {r['shown']}" for r in sorted(found, key=lambda r: (r["file"], r["shown"]))]
    return "\n".join(lines) + "\n"
