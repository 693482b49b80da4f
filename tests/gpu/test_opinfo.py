"""Torch's own tables of operators and modules on a CUDA device, beside eager. `make test-gpu`; whole by `python -m tests.opinfo --device cuda`."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.opinfo.check import check
from tests.opinfo.database import Case, calls, cases
from tests.opinfo.listed import KNOWN, known
from tests.opinfo.report import Summary, line
from tests.opinfo.workers import run_all

pytestmark = pytest.mark.gpu


def _sample() -> list[Case]:
    """For each row a forward pass in float32 (or what it has instead), and one dtype and variant, static or symbolic, chosen by its name."""
    rows: dict[str, list[Case]] = {}
    for case in (*cases(device="cuda"), *cases(device="cuda", dynamic=True)):
        if not known(case) and not (case.dynamic and case.entry.startswith("modules.")):
            rows.setdefault(case.entry, []).append(case)
    found = []
    for name, some in rows.items():
        forward = [c for c in some if c.variant == "forward" and not c.dynamic]
        found += sorted(forward, key=lambda c: c.dtype != "float32")[:1]
        variant = random.Random(name).choice(sorted({c.variant for c in some}))
        found.append(random.Random(name).choice([c for c in some if c.variant == variant]))
    return list(dict.fromkeys(found))


def test_sample(tmp_path: Path) -> None:
    """One call of each case, in processes of their own: an assertion on the device ends one."""
    summary = Summary()
    for report in run_all(_sample(), tmp_path, jobs=min(16, os.cpu_count() or 1), limit=1):
        summary.add(report)
    failed = [f"{Case(**r['case'])}: {r['failures'][:1]}" for r in summary.failures]
    assert not failed, "\n".join([line(summary), *failed])


@pytest.mark.parametrize("name", [n for n in KNOWN if n.endswith(" cuda")])
def test_known_failures_still_fail(name: str) -> None:
    row = name.split()[0].replace("*", ".*")
    found = [c for d in (False, True) for c in cases(f"^{row}$", device="cuda", dynamic=d) if known(c) == KNOWN[name]]
    assert any(check(call).different for case in found for call in calls(case)), "mended: take it off the list"
