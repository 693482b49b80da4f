"""What the memory of a GPU takes at once."""

from __future__ import annotations

VECTOR = 16  # bytes that a thread loads or stores at once at most, at an address that is a multiple of them

__all__ = ["VECTOR"]
