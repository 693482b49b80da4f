"""What lowerings ask about dtypes: kinds, ranges, promotion. Dtypes are torch's names as strings."""

from __future__ import annotations

from typing import Any

import torch

from ...ir.nodes import FLOATS, INTS
from ...ir.pairs import PART, WHOLE

_BITS = {"uint8": (0, 8), "int8": (1, 8), "int16": (1, 16), "int32": (1, 32), "int64": (1, 64)}
_HIGHEST = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
}


def is_float(d: str) -> bool:
    return d in FLOATS


def is_complex(d: str) -> bool:
    return d in PART


def part_dtype(d: str) -> str:
    """The dtype of real and imaginary part; a real dtype itself."""
    return PART.get(d, d)


def complex_of(d: str) -> str:
    """The complex dtype whose parts hold the values of a dtype."""
    return d if d in PART else WHOLE["float64" if d == "float64" else "float32"]


def is_int(d: str) -> bool:
    return d in INTS


def is_bool(d: str) -> bool:
    return d == "bool"


def is_signed(d: str) -> bool:
    return d not in ("bool", "uint8")


def highest(d: str) -> Any:
    """The largest finite value of a dtype."""
    if d in _BITS:
        signed, bits = _BITS[d]
        return 2 ** (bits - signed) - 1
    return True if d == "bool" else _HIGHEST[d]


def lowest(d: str) -> Any:
    if d in _BITS:
        signed, bits = _BITS[d]
        return -(2 ** (bits - 1)) if signed else 0
    return False if d == "bool" else -_HIGHEST[d]


def unspecified(d: str) -> Any:
    """What memory holds that a program asks for and does not write: anything, so 0; where torch is told to be deterministic what it fills it with."""
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # torch makes it a property of the module
    if not (filled and torch.are_deterministic_algorithms_enabled()):
        return 0
    return highest(d) if d in _BITS or d == "bool" else float("nan") if d in FLOATS or d in PART else 0


def opmath(d: str) -> str:
    return "float32" if d in ("float16", "bfloat16") else d


def float_of(d: str) -> str:
    return d if d in FLOATS or d in PART else "float32"


def sum_dtype(d: str) -> str:
    return d if d in FLOATS or d in PART else "int64"


def promote_types(a: str, b: str) -> str:
    """The dtype that holds two dtypes of equal standing (torch's table)."""
    if a == b:
        return a
    if a in PART or b in PART:
        return complex_of("float64" if "float64" in (part_dtype(a), part_dtype(b)) else "float32")
    if a == "bool":
        return b
    if b == "bool":
        return a
    if a in FLOATS or b in FLOATS:
        if a not in FLOATS:
            return b
        if b not in FLOATS:
            return a
        if {a, b} == {"float16", "bfloat16"}:
            return "float32"
        return max(a, b, key=FLOATS.index)
    if "uint8" in (a, b):
        other = b if a == "uint8" else a
        return "int16" if other == "int8" else other
    return max(a, b, key=INTS.index)


def category(d: str) -> int:
    """0 for bool, 1 for integers, 2 for floats, 3 for complex numbers."""
    return 3 if d in PART else 2 if d in FLOATS else 0 if d == "bool" else 1
