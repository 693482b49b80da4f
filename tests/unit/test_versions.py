"""Versions of torch: those that opforge knows, and what it says of others."""

import warnings

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
