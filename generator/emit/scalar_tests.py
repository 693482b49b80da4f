"""Reads specs/scalars.yaml, writes tests/generated/test_scalars.py: every scalar on every target against torch."""

from __future__ import annotations

from ..model import Model
from ..render import header, render

PATH = "tests/generated/test_scalars.py"


def emit(model: Model) -> dict[str, str]:
    """The test file, or nothing when there is no scalar spec."""
    part = model.part("scalars", None)
    if part is None or model.base is not None:
        return {}
    return {PATH: render("test_scalars.py.j2", header=header(PATH, "specs/scalars.yaml"), names=list(part.scalars))}
