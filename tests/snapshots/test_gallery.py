"""The code of each gallery program, whole, against a file that was read and accepted.

After a wanted change: `python -m pytest tests/snapshots --snapshot-update`, then read `git diff tests/snapshots`.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from opforge.runtime.torch_compat import minor_version
from tests.snapshots.programs import GALLERY, Program
from tests.support.stages import stages

ROOT = Path(__file__).parent.parent.parent


class MarkdownFiles(SingleFileSnapshotExtension):
    """One markdown file for each program, named by its test."""

    _write_mode = WriteMode.TEXT
    file_extension = "md"


def page(name: str, program: Program) -> str:
    """All stages of one program as a markdown page; nothing in it depends on the machine or the day."""
    found = stages(program.run, program.inputs(), dynamic=program.dynamic)
    target = type(program.run) if isinstance(program.run, torch.nn.Module) else program.run
    parts = [f"# {name}\n", _block("python", textwrap.dedent(inspect.getsource(target)))]
    for title, language, text in (
        ("Around the graph (dispatch)", "python", found.run),
        ("The graph", "python", found.call),
        ("Plan", "", found.plan),
        ("C++", "cpp", found.cpp),
        *(("Triton", "python", text) for text in found.triton),
    ):
        parts += [f"## {title}\n", _block(language, text)]
    return "\n".join(parts)


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.strip()}\n```\n"


ELSE_NUMBERED = ("mutated_buffer",)
"""Programs whose pages differ with torch 2.11 in the numbers of values."""


@pytest.mark.parametrize("name", GALLERY)
def test_code(name: str, snapshot: SnapshotAssertion) -> None:
    if name in ELSE_NUMBERED and minor_version() == "2.11":
        pytest.skip("C18: Dynamo of torch 2.11 numbers the values of this program otherwise")
    text = page(name, GALLERY[name])
    assert not re.search(r"(?<![\w/])/(home|root|tmp|usr|work)/|0x[0-9a-f]{8,}\b|-march", text)
    assert text == snapshot(extension_class=MarkdownFiles)


SCRIPT = """
import json, sys
import torch
torch.set_num_threads(3)
from tests.snapshots.test_gallery import GALLERY, page
json.dump({name: page(name, GALLERY[name]) for name in GALLERY if name not in sys.argv}, sys.stdout)
"""


def test_code_does_not_depend_on_hashes_threads_or_processor(tmp_path: Path) -> None:
    """A process with another hash seed, thread count and processor, in another folder, prints the accepted pages."""
    env = {**os.environ, "PYTHONHASHSEED": "7", "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": str(ROOT)}
    left_out = ELSE_NUMBERED if minor_version() == "2.11" else ()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *left_out], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    accepted = Path(__file__).parent / "__snapshots__" / "test_gallery"
    for name, text in json.loads(done.stdout).items():
        assert text == (accepted / f"test_code[{name}].md").read_text(), name
