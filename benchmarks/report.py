"""Results as a markdown table and JSON, with the machine, versions and commit that they belong to."""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from measure import geomean

ROOT = Path(__file__).parent.parent


def _first_match(path: str, prefix: str) -> str:
    try:
        with open(path) as f:
            return next((line.split(":", 1)[1].strip() for line in f if line.startswith(prefix)), "")
    except OSError:
        return ""


def _git(*args: str) -> str:
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""


def _tool(*command: str) -> str:
    try:
        return (subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines() or [""])[0]
    except OSError:
        return "none"


def machine(threads: int) -> dict[str, Any]:
    """Processor, versions and commit; nothing that identifies a particular host."""
    return {
        "cpu": _first_match("/proc/cpuinfo", "model name") or platform.processor(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiler": _tool("g++", "--version"),
        "commit": _git("rev-parse", "--short=12", "HEAD")
        + ("+changes" if _git("status", "--porcelain", "--", ".", ":!benchmarks/results") else ""),
    }


def command() -> str:
    """The command of this run, as it is typed in the repository's root, less what says nothing of what is measured: `--resume` and where
    results are written.
    """
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    options = sys.argv[1:]
    said = [
        a
        for before, a in zip(["", *options], options, strict=False)
        if a not in ("--resume", "--out") and before != "--out" and not a.startswith("--out=")
    ]
    return shlex.join(["python", str(name), *said])


def heading(result: Mapping[str, Any], more: str = "") -> list[str]:
    """What stands above the tables of a result: the machine and the command that it belongs to (older results have no command).
    `more` ends the first line.
    """
    facts = ", ".join(f"{k} {v}" for k, v in result["machine"].items())
    lines = [f"Machine: {facts}{more}.", ""]
    return [*lines, f"Command: `{result['command']}`", ""] if "command" in result else lines


def beyond_dynamo(row: Mapping[str, Any], name: str) -> float | None:
    """Cold first call of `name` less that of a backend that compiles nothing, in seconds; the time spent inside the backend where that is more
    (Dynamo's own time differs from process to process).
    """
    mine, base = row.get("cold", {}).get(name, {}), row.get("cold", {}).get("dynamo", {})
    if "first_call_s" not in mine or "first_call_s" not in base:
        return None
    return max(mine["first_call_s"] - base["first_call_s"], mine["backend_s"])


def _column(rows: list[dict[str, Any]], pick: Any) -> list[float]:
    values = [pick(r) for r in rows]
    return [v for v in values if v is not None]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means, worst cases and broken rules over all programs that ran."""
    out: dict[str, Any] = {}
    for pair in ("inductor/eager", "opforge/eager", "opforge/inductor"):
        values = _column(rows, lambda r, p=pair: r.get("speed", {}).get(p))
        if values:
            out[f"speed {pair}"] = {
                "geomean": geomean(values), "min": min(values), "below_1": sum(v < 1 for v in values), "n": len(values)
            }  # fmt: skip
    ratios = _column(
        rows,
        lambda r: (
            None if (a := beyond_dynamo(r, "opforge")) is None or (b := beyond_dynamo(r, "inductor")) is None else a / b
        ),
    )
    if ratios:
        out["cold compile beyond Dynamo, opforge/inductor"] = {
            "geomean": geomean(ratios),
            "max": max(ratios),
            "n": len(ratios),
        }
    out["inaccurate"] = {
        b: [r["name"] for r in rows if r.get("accurate", {}).get(b) is False] for b in ("inductor", "opforge")
    }
    out["failed"] = {r["name"]: r["failed"] for r in rows if r.get("failed")}
    out["skipped"] = [r["name"] for r in rows if "skipped" in r]
    return out


def _number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None or (isinstance(value, float) and math.isnan(value)) else format(value, form)


def one_line(row: Mapping[str, Any]) -> str:
    """The row for the progress display."""
    parts = [f"eager {row['ms']['eager']:.3f} ms"] + [
        f"{k} {v:.2f}x" for k, v in row["speed"].items() if not k.endswith("opforge")
    ]
    parts += [f"{k} FAILED: {v}" for k, v in row["failed"].items()]
    parts += [f"{k} INACCURATE" for k, ok in row["accurate"].items() if not ok]
    return " · ".join(parts)


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    speed, err, cold = row.get("speed", {}), row.get("errors", {}), row.get("cold", {})
    yield row["name"]
    yield row["shape"]
    yield _number(row.get("ms", {}).get("eager"), ".3f")
    for pair in ("inductor/eager", "opforge/eager", "opforge/inductor"):
        yield _number(speed.get(pair))
    for name in ("eager", "inductor", "opforge"):
        mark = " ✗" if row.get("accurate", {}).get(name) is False else ""
        yield _number(err.get(name, {}).get("max_abs"), ".1e") + mark
    for name in ("inductor", "opforge"):
        count = cold.get(name, {}) if "kernels" in cold.get(name, {}) else row.get("counts", {}).get(name, {})
        yield f"{count['kernels']} + {count.get('externs', 0)}" if "kernels" in count else "–"
    if cold:
        yield _number(cold.get("dynamo", {}).get("first_call_s"))
        yield from (_number(beyond_dynamo(row, name)) for name in ("inductor", "opforge"))
        yield " / ".join(_number(cold.get(n, {}).get("run_peak_mb"), ".0f") for n in ("eager", "inductor", "opforge"))


def markdown(result: Mapping[str, Any]) -> str:
    """The whole report as markdown."""
    head = ["program", "size", "eager ms", "Inductor : eager", "opforge : eager", "opforge : Inductor"]
    head += ["error eager", "error Inductor", "error opforge", "kernels + externs Inductor", "… opforge"]
    if any("cold" in r for r in result["programs"]):
        head += ["Dynamo s", "Inductor compile s", "opforge compile s", "resident MB eager / Inductor / opforge"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in result["programs"]:
        cells = list(_cells(row))
        lines.append("| " + " | ".join(cells + ["–"] * (len(head) - len(cells))) + " |")
    notes = [
        "Speeds are ratios of times (median over rounds, interleaved): above 1, the first is faster. Errors are the",
        "largest absolute difference from a float64 run; ✗ marks more than twice eager's. Compile seconds are cold",
        "(fresh process, fresh caches), without Dynamo's own time and without the backend's imports.",
    ]
    totals = [
        f"- {name}: " + ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items())
        for name, value in result["summary"].items()
        if isinstance(value, dict) and value
    ]
    return "\n".join([*heading(result, f"; {result['rounds']} rounds"), *notes, "", *lines, "", *totals, ""])


def write(result: Mapping[str, Any], text: str, folder: Path, stem: str = "latest") -> list[Path]:
    """Write `<stem>.json` and `<stem>.md`; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
    paths[0].write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    paths[1].write_text(text)
    return paths
