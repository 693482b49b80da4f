"""The results of `gpu_models.py`: one line for each program, the table and what it comes to."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import report
from measure import geomean

Row = Mapping[str, Any]
PAIRS = (
    ("opforge", "inductor"),
    ("opforge-reduce", "inductor-reduce"),
    ("opforge", "eager"),
    ("inductor", "eager"),
    ("opforge-reduce", "eager"),
    ("inductor-reduce", "eager"),
    ("opforge-max", "inductor-max"),
    ("opforge-max", "opforge-reduce"),
)
NOISE_MB = 1.0  # peaks below it are not compared


def ratios(rows: list[dict[str, Any]], table: str, mine: str, other: str, least: float = 0.0) -> dict[str, float]:
    """mine : other by program, where both are above `least`."""
    both = {r["name"]: (r.get(table, {}).get(mine), r.get(table, {}).get(other)) for r in rows}
    return {n: a / b for n, (a, b) in both.items() if a is not None and b is not None and a > least and b > least}


def summary(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Geometric means of ratios over the programs that ran under both, and lists of those that are slower or inaccurate."""
    found: dict[str, Any] = {}
    for mine, other in PAIRS:
        speed = {n: 1 / q for n, q in ratios(rows, "us", mine, other).items()}
        if not speed:
            continue
        found[f"speed {mine}/{other}"] = geomean(list(speed.values()))
        for kind in sorted({str(r["kind"]) for r in rows} | {"launch"}):
            some = [
                q
                for n, q in speed.items()
                for r in rows
                if r["name"] == n and (r["launch"] if kind == "launch" else r["kind"] == kind)
            ]
            if some:
                found[f"speed {mine}/{other}, {kind} ({len(some)})"] = geomean(some)
        found[f"slower {mine}/{other}"] = {n: round(q, 3) for n, q in speed.items() if q < 1}
    for mine, other in PAIRS[:2]:
        for table, least in (("peak_mb", NOISE_MB), ("reserved_mb", NOISE_MB), ("compile_s", 0.0), ("first_s", 0.0)):
            if some_ratios := ratios(rows, table, mine, other, least):
                found[f"{table} {mine}/{other} ({len(some_ratios)})"] = geomean(list(some_ratios.values()))
                worse = {n: round(q, 2) for n, q in some_ratios.items() if q > 1}
                found[f"{table} higher {mine}/{other}"] = worse
    for n in names:
        found[f"inaccurate {n}"] = [r["name"] for r in rows if r.get("accurate", {}).get(n) is False]
    return found


def failures(rows: list[dict[str, Any]], names: list[str]) -> dict[str, list[str]]:
    """The programs that did not run, under each backend."""
    return {f"failed {n}": [r["name"] for r in rows if n in r["failed"] or "all" in r["failed"]] for n in names}


def notes(row: Row, names: list[str]) -> list[str]:
    """What went wrong, ran eagerly or without a CUDA graph."""
    found = [f"{n} FAILED: {e}" for n, e in row["failed"].items()]
    if "no_reference" in row:
        found.append(f"no float64 run: {row['no_reference']}")
    for n, ok in row.get("accurate", {}).items():
        if not ok:
            mine, eager = (row["errors"].get(k, {}).get("rel_norm", float("nan")) for k in (n, "eager"))
            found.append(f"{n} INACCURATE {mine:.1e} (eager {eager:.1e})")
    for n in names:
        curve, eager = row.get("curve_error", {}).get(n), row.get("curve_error", {}).get("eager")
        if curve is not None and eager is not None and curve > max(2 * eager, 1e-3):
            found.append(f"{n} losses off by {curve:.1e} (eager {eager:.1e})")
        counts = row.get("counts", {}).get(n, {})
        found += [f"{n} fallback x{c}: {w}" for w, c in (counts.get("fallbacks") or {}).items()]
        if n.endswith("reduce"):
            found += [f"{n} unrecorded x{c}: {w}" for w, c in (counts.get("unrecorded") or {}).items()]
            if counts.get("cudagraph_skips"):
                found.append(f"{n} skipped {counts['cudagraph_skips']} graphs: {'; '.join(counts['skip_reasons'])}")
    return found


def one_line(row: Row, names: list[str]) -> str:
    """The progress of a run."""
    times = ", ".join(f"{n} {us:.0f}" for n, us in row.get("us", {}).items())
    compiled = "/".join(f"{row['compile_s'][n]:.1f}" for n in names if n in row.get("compile_s", {}))
    peaks = "/".join(f"{row['peak_mb'][n]:.0f}" for n in ("eager", *names) if n in row.get("peak_mb", {}))
    text = f"{row['name']}: us {times}; compile s {compiled}; peak MB {peaks}; took {row.get('took_s', 0):.0f} s"
    return "\n    ".join([text, *notes(row, names)])


def cell(row: Row, table: str, name: str, form: str) -> str:
    value = row.get(table, {}).get(name)
    return "—" if value is None else format(value, form)


def curves(rows: list[Row], names: list[str]) -> list[str]:
    """The losses of a few training steps: the largest relative distance from float64's curve and from eager's."""
    head = [
        "program",
        "steps",
        *(f"losses {n} : float64" for n in ("eager", *names)),
        *(f"losses {n} : eager" for n in names),
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in rows:
        if losses := r.get("losses", {}):
            cells = [cell(r, "curve_error", n, ".1e") for n in ("eager", *names)]
            cells += [cell(r, "curve_to_eager", n, ".1e") for n in names]
            lines.append(f"| {' | '.join([r['name'], str(len(next(iter(losses.values())))), *cells])} |")
    return lines if len(lines) > 2 else []


def markdown(result: Mapping[str, Any]) -> str:
    """The tables of results."""
    names = result["names"]
    every = ["eager", *names]
    lines = report.heading(result)
    head = ["program", "size", "kind", *(f"{n} µs" for n in every)]
    pairs = [(a, b) for a, b in PAIRS if a.startswith("opforge") and b.startswith("inductor") and {a, b} <= {*names}]
    head += [f"{a} : {b}" for a, b in pairs]
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in result["programs"]:
        us = r.get("us", {})
        speeds = [f"{us[b] / us[a]:.2f}" if a in us and b in us else "—" for a, b in pairs]
        kind = r["kind"] + (", wall clock" if r.get("launch") else "")
        lines.append(
            f"| {' | '.join([r['name'], r['shape'], kind, *(cell(r, 'us', n, '.1f') for n in every), *speeds])} |"
        )
    head = ["program", *(f"peak MB {n}" for n in every), *(f"reserved MB {n}" for n in every)]
    head += [*(f"compile s {n}" for n in names), *(f"first step s {n}" for n in names), *(f"error {n}" for n in every)]
    lines += ["", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in result["programs"]:
        cells = [
            r["name"],
            *(cell(r, "peak_mb", n, ".0f") for n in every),
            *(cell(r, "reserved_mb", n, ".0f") for n in every),
        ]
        cells += [cell(r, "compile_s", n, ".2f") for n in names] + [cell(r, "first_s", n, ".2f") for n in names]
        cells += [format(r["errors"][n]["rel_norm"], ".1e") if n in r.get("errors", {}) else "—" for n in every]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *curves(result["programs"], names), ""]
    lines += [f"- {r['name']}: {note}" for r in result["programs"] for note in notes(r, names)]
    lines.append("")
    lines += [f"- {k}: {v:.3f}" if isinstance(v, float) else f"- {k}: {v}" for k, v in result["summary"].items()]
    return "\n".join(lines) + "\n"


def measured(out: Path, machine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that a folder has. Raises ValueError where they are of another GPU."""
    file = out / "gpu_models.json"
    if not file.exists():
        return []
    before = json.loads(file.read_text())
    if (gpu := before["machine"].get("gpu")) != machine.get("gpu"):
        raise ValueError(f"{file} was measured on {gpu}, this is {machine.get('gpu')}")
    rows: list[dict[str, Any]] = before["programs"]
    return rows


def write(out: Path, machine: Mapping[str, Any], names: list[str], rows: list[dict[str, Any]]) -> None:
    """`gpu_models.json` and `gpu_models.md` in `out`, with the rows so far."""
    finished = [r for r in rows if "us" in r]
    found = summary(finished, names) | failures(rows, names)
    result = {"machine": machine, "command": report.command(), "names": names, "programs": rows, "summary": found}
    for name, text in (("gpu_models.json", json.dumps(result, indent=1) + "\n"), ("gpu_models.md", markdown(result))):
        part = out / f"{name}.part"
        part.write_text(text)
        part.replace(out / name)
