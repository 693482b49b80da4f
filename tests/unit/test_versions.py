"""Versions of torch: those that opforge knows, and what it says of others."""

import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from opforge.errors import OpforgeWarning
from opforge.generated.ops import TORCH_VERSIONS
from opforge.runtime.torch_compat import minor_version, warn_of_unknown_version


def test_the_installed_version_is_known() -> None:
    assert minor_version() in TORCH_VERSIONS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unknown_version(TORCH_VERSIONS)


def test_an_unknown_version_is_told_with_the_tested_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "3.1.0+cpu")
    told = r"tested with torch 2\.11 to 2\.\d+, this is torch 3\.1\.0\+cpu; operators that it does not know run eagerly"
    with pytest.warns(OpforgeWarning, match=told):
        warn_of_unknown_version(TORCH_VERSIONS)


TOOL = Path(__file__).parents[2] / "tools" / "versions.py"


def test_the_tool_sorts_builds_of_any_name() -> None:
    """A nightly build's counts were lost after its whole suite had run."""
    numbers = runpy.run_path(str(TOOL))["numbers"]
    builds = ["2.9.1+cpu", "2.11.0a0+git1234", "2.15.0.dev20261101+cpu", "2.15.0rc1", "3.0"]
    assert min(builds[::-1], key=numbers) == "2.9.1+cpu"
    assert numbers("2.15.0.dev20261101+cpu") == [2, 15, 0, 20261101]


@pytest.mark.parametrize(("python", "said"), [("/no/such/python", "cannot be run"), ("/bin/false", "has no torch")])
def test_the_tool_refuses_what_is_no_interpreter(python: str, said: str) -> None:
    ran = subprocess.run([sys.executable, str(TOOL), "--python", python], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
