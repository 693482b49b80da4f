"""Reads specs/ops.yaml and what it includes, writes tests/generated/test_ops.py: every native entry against eager."""

from __future__ import annotations

from ..model import Model
from ..op_entries import OpEntry
from ..render import header, literal

PATH = "tests/generated/test_ops.py"


def emit(model: Model) -> dict[str, str]:
    """One test per entry, or nothing when there is no operator spec."""
    entries: tuple[OpEntry, ...] = tuple(e for e in model.part("ops") if e.lowerings)
    if not entries:
        return {}
    lines = [
        '"""Every operator entry against eager: all its overloads and cases in one compiled graph, none by an eager kernel."""',
        "",
        "import pytest",
        "",
        "from opforge.testing.op_check import Op, check_op",
        "",
        "OPS = [",
        *(f"    {_op(e)}," for e in sorted(entries, key=lambda e: (e.family, e.id))),
        "]",
        "",
        "",
        '@pytest.mark.parametrize("op", OPS, ids=[op.id for op in OPS])',
        "def test_op(op: Op) -> None:",
        "    check_op(op)",
    ]
    return {PATH: header(PATH, "specs/ops.yaml") + "\n".join(lines) + "\n"}


def _op(e: OpEntry) -> str:
    parts = [literal(e.id), literal(e.kind), literal(tuple(w.schema.id for w in e.lowerings))]
    if e.tests:
        parts.append(f"tests={literal(e.tests)}")
    if e.test_dtypes:
        parts.append(f"dtypes={literal(e.test_dtypes)}")
    if e.complex:
        parts.append("complex_=True")
    if e.unspecified:
        parts.append("values=False")
    return f"Op({', '.join(parts)})"
