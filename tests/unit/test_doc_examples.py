"""The examples of pages in docs/ run, each in a process of its own, and print what their comments say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = {
    f"{page} {number}": block
    for page in ("programs.md", "slow.md")
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S), 1)
}


def said(block: str) -> list[str]:
    """What comments beside a `print`, or in a line behind one, say that it prints."""
    found = []
    for line, after in zip(block.splitlines(), [*block.splitlines()[1:], ""], strict=True):
        if "print(" in line and "  # " in line:
            found.append(line.rpartition("  # ")[2])
        elif "print(" in line and after.startswith("# "):
            found.append(after.removeprefix("# "))
    return found


def shown(text: str, output: str) -> bool:
    """Whether it is printed: with other text where it has "...", and numbers between commas each by itself."""
    parts = [p.strip() for p in re.split(r"\.\.\.|, (?=\d+$|\d+, )", text)]
    return all(p in output for p in parts)


@pytest.mark.parametrize("number", BLOCKS)
def test_runs_and_prints_what_it_says(number: str, tmp_path: Path) -> None:
    block, script = BLOCKS[number], tmp_path / "example.py"
    script.write_text(block)
    env = os.environ | {"OPFORGE_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    if not torch.__version__.startswith("2.13."):  # others say some things in other words
        return
    missing = [text for text in said(block) if not shown(text, done.stdout)]
    assert not missing, f"not printed: {missing}\n{done.stdout}"
