"""opforge as the compiler of SGLang: a platform that is the machine's own, but answers `get_compile_backend` with "opforge".

SGLang finds `activate` by its entry points. `SGLANG_PLATFORM=opforge` chooses it; without that variable it leaves the choice to SGLang.

The platform does not call itself out of tree: SGLang would ask such a one for memory pools and graph runners too. A release of SGLang that asks no
other platform for its backend goes on with Inductor.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

__all__ = ["activate"]

_NAME = "opforge"


def activate() -> str | None:
    """The name of the platform's class, or None where nobody has asked for it."""
    return f"{__name__}:Platform" if os.environ.get("SGLANG_PLATFORM") == _NAME else None


def __getattr__(name: str) -> Any:
    """`Platform`, which is made when SGLang asks for it: its base class is SGLang's."""
    if name == "Platform":
        return _platform()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _platform() -> type:
    from sglang.srt.platforms.interface import SRTPlatform

    base: type = SRTPlatform
    if torch.cuda.is_available() and torch.version.hip is None:
        from sglang.srt.platforms.cuda import CudaSRTPlatform

        base = CudaSRTPlatform

    def get_compile_backend(self: Any, mode: str | None = None, **others: Any) -> str:
        """The backend's name for `torch.compile`, whatever the mode."""
        return _NAME

    members = {"get_compile_backend": get_compile_backend, "__module__": __name__}
    return type("Platform", (base,), members)
