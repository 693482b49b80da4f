"""docs/stages.md shows what the stages give today."""

import importlib.util
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page shows the graph of torch 2.13")
def test_the_page_of_stages_is_fresh() -> None:
    spec = importlib.util.spec_from_file_location("print_stages", ROOT / "tools" / "print_stages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fresh = module.stages()
    assert fresh == (ROOT / "docs" / "stages.md").read_text(), "run: .venv/bin/python tools/print_stages.py"
