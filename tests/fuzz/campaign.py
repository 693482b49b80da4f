"""A campaign over many sessions: parts of some programs of one family, each a line of a file that later runs continue and totals are made of."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .workers import Range, Summary, run_all


@dataclass
class Part:
    """Consecutive seeds of one family, and what came of them at one commit."""

    family: str
    first: int
    programs: int
    graphs: int
    eager_graphs: int
    differences: list[str] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    commit: str = ""
    device: str = "cpu"

    @classmethod
    def of(cls, given: Range, summary: Summary, seconds: float, device: str = "cpu") -> Part:
        """The part that a finished range is."""
        counts = summary.families[given.family]
        return cls(
            given.family,
            given.seeds.start,
            counts.programs,
            counts.graphs,
            counts.eager_graphs,
            [f"{program}: {kind}" for program, kind in summary.failures],
            dict(summary.ordinary_reasons.most_common()),
            round(seconds, 1),
            _commit(),
            device,
        )


def read(path: Path) -> list[Part]:
    """The parts that a file holds; none where there is no file."""
    return [Part(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def ranges(parts: Iterable[Part], families: Sequence[str], first: int, size: int) -> Iterator[Range]:
    """The next ranges of `size` seeds without end, of each family in turn; a new family begins with the seed `first`."""
    following = dict.fromkeys(families, first)
    for part in parts:
        if part.family in following:
            following[part.family] = max(following[part.family], part.first + part.programs)
    while True:
        for family in families:
            yield Range(family, range(following[family], following[family] + size))
            following[family] += size


def run(path: Path, families: Sequence[str], options: Any, folder: Path) -> int:
    """Add parts to the file until `options.minutes` are over; returns how many programs differ from eager."""
    end = time.monotonic() + 60 * options.minutes
    found = 0
    for given in ranges(read(path), families, options.first, options.part):
        start = time.monotonic()
        if start >= end:
            return found
        summary = Summary()
        run_all([given], options, folder, summary)
        part = Part.of(given, summary, time.monotonic() - start, options.device)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(asdict(part)) + "\n")
        print(f"# {path.name}: {given.family} from {part.first} on, {len(part.differences)} differ", flush=True)
        found += len(part.differences)
    return found


def totals(parts: Sequence[Part]) -> str:
    """The table by family, the reasons of graphs that ran eagerly, and the programs that differed."""
    lines = [f"{sum(p.programs for p in parts)} programs, {sum(len(p.differences) for p in parts)} differ from eager"]
    lines.append(f"  {'family':12} {'programs':>9} {'differ':>7} {'graphs':>7} {'eager':>6}  seeds, commits")
    for family in dict.fromkeys(p.family for p in parts):
        own = [p for p in parts if p.family == family]
        graphs, eager = sum(p.graphs for p in own), sum(p.eager_graphs for p in own)
        lines.append(
            f"  {family:12} {sum(p.programs for p in own):9} {sum(len(p.differences) for p in own):7} {graphs:7} "
            f"{eager / max(graphs, 1):6.2%}  {', '.join(_seeds(own))}; {', '.join(dict.fromkeys(p.commit for p in own))}"
        )
    reasons = sum((Counter(p.reasons) for p in parts), Counter())
    lines += [f"  {n:6} left to eager: {reason}" for reason, n in reasons.most_common(24)]
    lines += [f"  {text} ({p.commit})" for p in parts for text in p.differences]
    return "\n".join(lines)


def _seeds(parts: Sequence[Part]) -> list[str]:
    """The ranges of seeds, those that adjoin as one."""
    found: list[list[int]] = []
    for p in sorted(parts, key=lambda p: p.first):
        if found and found[-1][1] == p.first:
            found[-1][1] = p.first + p.programs
        else:
            found.append([p.first, p.first + p.programs])
    return [f"{first}..{end - 1}" for first, end in found]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
