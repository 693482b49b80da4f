"""Run the test suite with one version of torch, note the counts, and write docs/versions.md.

    python tools/versions.py --python /path/to/python        the whole suite of `make test`, by an interpreter that has torch and opforge
    python tools/versions.py --python … tests/programs       a part of it
    python tools/versions.py                                 writes the page again

The interpreter's environment is made by `make setup TORCH=torch==2.15.0`, in a clone of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
HEAD = """<!-- Written by `python tools/versions.py`. Do not edit. -->

# Versions of torch

One wheel serves all of them, and `generated/` is the same for all. With another version there is one warning, with this range, and opforge tries.

| torch | Triton | tests | passed | failed | left out | of opforge's commit |
|---|---|---|---|---|---|---|
"""
TELL = """
import importlib.util, json, torch
triton = __import__("triton").__version__ if importlib.util.find_spec("triton") else ""
print(json.dumps({"torch": torch.__version__, "triton": triton}))
"""


def counts(report: Path) -> dict[str, int]:
    """How many tests passed, failed and were left out (skipped, or expected to fail), of pytest's JUnit report."""
    suites = ET.parse(report).getroot().iter("testsuite")
    found = {"passed": 0, "failed": 0, "left out": 0}
    for suite in suites:
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped = int(suite.get("skipped", 0))
        found["failed"] += failed
        found["left out"] += skipped
        found["passed"] += int(suite.get("tests", 0)) - failed - skipped
    return found


def run(python: str, paths: list[str]) -> dict[str, Any]:
    """Run the tests below `paths` (all without any); raises `SystemExit` where they did not run to the end."""
    try:
        told = subprocess.run([python, "-c", TELL], capture_output=True, text=True, check=False)
    except OSError as error:
        raise SystemExit(f"{python} cannot be run: {error.strerror}") from None
    if told.returncode:
        raise SystemExit(f"{python} has no torch that can be imported:\n{told.stderr.strip()}")
    versions = json.loads(told.stdout)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            python,
            "-m",
            "pytest",
            "-n",
            "2",
            "-q",
            "-m",
            "not slow and not gpu",
            f"--junitxml={report}",
            *paths,
        ]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code not in (0, 1) or not report.exists():
            raise SystemExit(f"pytest ended with {code}: nothing is noted")
        found = counts(report)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {**versions, "tests": " ".join(paths) or "all", **found, "commit": commit.stdout.strip()}


def numbers(version: str) -> list[int]:
    """The key by which versions are sorted; a nightly build has letters in its version."""
    return [int(n) for n in re.findall(r"\d+", version.split("+")[0])]


def page(rows: list[dict[str, Any]]) -> str:
    keys = ("torch", "triton", "tests", "passed", "failed", "left out", "commit")
    return HEAD + "".join("| " + " | ".join(str(row[k]) for k in keys) + " |\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="the interpreter whose torch is tested")
    parser.add_argument("paths", nargs="*", help="tests to run (default: all)")
    told = parser.parse_args()
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    if told.python:
        row = run(told.python, told.paths)
        rows = [r for r in rows if (r["torch"], r["tests"]) != (row["torch"], row["tests"])] + [row]
        rows.sort(key=lambda r: (numbers(r["torch"]), r["torch"], r["tests"]))
        RESULTS.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    elif told.paths:
        sys.exit("name the interpreter: --python /path/to/python")
    PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
