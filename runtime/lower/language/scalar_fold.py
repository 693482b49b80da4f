"""Evaluation of scalar operations on constants by Python's own arithmetic, rounded to the dtype: only where that is exact or correctly rounded."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from typing import Any

from ....errors import UnsupportedError
from ...ir.nodes import FLOATS
from .dtypes import highest, lowest

Number = bool | int | float


def rounded(value: float, dtype: str) -> float:
    """The nearest number of a floating dtype (ties to even)."""
    if dtype == "float64" or value != value or math.isinf(value):
        return value
    if dtype == "bfloat16":
        bits = struct.unpack("<I", struct.pack("<f", rounded(value, "float32")))[0]
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0])
    code = "<f" if dtype == "float32" else "<e"
    try:
        return float(struct.unpack(code, struct.pack(code, value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def as_dtype(value: Number, dtype: str) -> Number:
    """A Python number as the dtype holds it. Raises `UnsupportedError` for what an integer cannot hold."""
    if dtype == "bool":
        return bool(value)
    if dtype in FLOATS:
        return rounded(float(value), dtype)
    if isinstance(value, float) and not math.isfinite(value):
        raise UnsupportedError(f"{value} is not a number of {dtype}")
    if not lowest(dtype) <= int(value) <= highest(dtype):
        raise UnsupportedError(f"{value} is out of range for {dtype}")
    return int(value)


def wrapped(value: int, dtype: str) -> int:
    """Two's complement wrap-around of an integer dtype."""
    span = highest(dtype) - lowest(dtype) + 1
    return int((value - lowest(dtype)) % span + lowest(dtype))


def _div(a: float, b: float) -> float | None:
    return a / b if b else None


def _extreme(pick: Callable[..., Any]) -> Callable[[Number, Number], Number | None]:
    def fold(a: Number, b: Number) -> Number | None:
        if a != a or b != b:
            return math.nan
        return None if a == b == 0 else pick(a, b)  # of two zeros, the sign would matter

    return fold


EXACT: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": _div, "neg": operator.neg, "abs": abs,
    "sqrt": lambda a: math.sqrt(a) if a >= 0 else None, "reciprocal": lambda a: 1 / a if a else None,
    "maximum": _extreme(max), "minimum": _extreme(min), "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "logical_and": lambda a, b: a and b, "logical_or": lambda a, b: a or b,
    "logical_xor": operator.ne, "logical_not": operator.not_, "floor": lambda a: float(math.floor(a)) if math.isfinite(a) else a,
}  # fmt: skip
"""Functions of Python numbers; None: do not fold. The double result of + - * / and sqrt rounds to float32 and below as one rounding would."""

ON_NUMBERS: dict[str, Callable[..., Any]] = {
    **EXACT, "exp": math.exp, "log": math.log, "log2": math.log2, "log1p": math.log1p, "expm1": math.expm1, "tanh": math.tanh, "sin": math.sin,
    "cos": math.cos, "erf": math.erf, "pow": operator.pow, "floordiv": operator.floordiv, "remainder": operator.mod, "isnan": math.isnan,
    "lgamma": math.lgamma, "rsqrt": lambda a: 1 / math.sqrt(a), "isinf": math.isinf, "trunc": math.trunc, "isfinite": math.isfinite,
}  # fmt: skip
"""For calls whose arguments are all Python numbers (attributes)."""


def fold(op: str, values: tuple[Number, ...], dtype: str) -> Number | None:
    """The value of an operation on constants with the result dtype `dtype`; None where it is left to the kernel."""
    function = EXACT.get(op)
    if function is None:
        return None
    value = function(*values)
    if value is None:
        return None
    if dtype == "bool":
        return bool(value)
    if dtype in FLOATS:
        return rounded(float(value), dtype)
    return wrapped(int(value), dtype)
