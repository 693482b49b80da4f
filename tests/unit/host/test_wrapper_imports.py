"""What wrappers import is there for each target."""

from __future__ import annotations

import importlib

from opforge.runtime.execute import support


def test_wrappers_for_a_gpu_find_what_those_for_a_processor_do() -> None:
    cuda = importlib.import_module("opforge.runtime.execute.cuda")
    assert [name for name in support.__all__ if not hasattr(cuda, name)] == []
