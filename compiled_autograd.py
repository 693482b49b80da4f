"""Compiled autograd: a whole backward as one compiled graph.

with opforge.compiled_autograd.enable():
    loss.backward()
"""

from typing import Any

from .runtime.capture.switch import disable, enable, in_region, reset

__all__ = ["disable", "enable", "reset"]


def __getattr__(name: str) -> Any:
    if name == "in_compiled_autograd_region":
        return in_region()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
