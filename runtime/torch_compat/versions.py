"""Which versions of torch opforge was made for."""

import warnings
from collections.abc import Sequence

import torch

from ...errors import OpforgeWarning

__all__ = [
    "minor_version", "warn_of_unknown_version",
]  # fmt: skip


def minor_version() -> str:
    """The installed torch's, as `2.13`."""
    return ".".join(torch.__version__.split(".")[:2])


def warn_of_unknown_version(known: Sequence[str]) -> None:
    """Says so where the installed torch is none of `known` (`2.13`, oldest first): opforge tries what it can."""
    if minor_version() not in known:
        tested = f"opforge was tested with torch {known[0]} to {known[-1]}"
        message = f"{tested}, this is torch {torch.__version__}; operators that it does not know run eagerly"
        warnings.warn(message, OpforgeWarning, stacklevel=2)
