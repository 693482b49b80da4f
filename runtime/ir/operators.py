"""Python's operators on scalar nodes: each builds the scalar of the same meaning.

Which that is the scalar specs tell, so `lower.language.scalar_ops` sets `_binary` and `_unary`; without it they raise TypeError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self


def _no_operators(symbol: str, *_: Any) -> NoReturn:
    raise TypeError(f"operator {symbol!r} on scalar nodes needs runtime.lower.language.scalar_ops to be imported")


class Operators:
    __slots__ = ()
    _binary: Callable[[str, Any, Any], Any] = staticmethod(_no_operators)
    _unary: Callable[[str, Any], Any] = staticmethod(_no_operators)

    def __add__(self, other: Any) -> Self:
        return self._binary("+", self, other)

    def __radd__(self, other: Any) -> Self:
        return self._binary("+", other, self)

    def __sub__(self, other: Any) -> Self:
        return self._binary("-", self, other)

    def __rsub__(self, other: Any) -> Self:
        return self._binary("-", other, self)

    def __mul__(self, other: Any) -> Self:
        return self._binary("*", self, other)

    def __rmul__(self, other: Any) -> Self:
        return self._binary("*", other, self)

    def __truediv__(self, other: Any) -> Self:
        return self._binary("/", self, other)

    def __rtruediv__(self, other: Any) -> Self:
        return self._binary("/", other, self)

    def __floordiv__(self, other: Any) -> Self:
        return self._binary("//", self, other)

    def __rfloordiv__(self, other: Any) -> Self:
        return self._binary("//", other, self)

    def __mod__(self, other: Any) -> Self:
        return self._binary("%", self, other)

    def __rmod__(self, other: Any) -> Self:
        return self._binary("%", other, self)

    def __pow__(self, other: Any) -> Self:
        return self._binary("**", self, other)

    def __rpow__(self, other: Any) -> Self:
        return self._binary("**", other, self)

    def __and__(self, other: Any) -> Self:
        return self._binary("&", self, other)

    def __rand__(self, other: Any) -> Self:
        return self._binary("&", other, self)

    def __or__(self, other: Any) -> Self:
        return self._binary("|", self, other)

    def __ror__(self, other: Any) -> Self:
        return self._binary("|", other, self)

    def __xor__(self, other: Any) -> Self:
        return self._binary("^", self, other)

    def __lshift__(self, other: Any) -> Self:
        return self._binary("<<", self, other)

    def __rshift__(self, other: Any) -> Self:
        return self._binary(">>", self, other)

    def __lt__(self, other: Any) -> Self:
        return self._binary("<", self, other)

    def __le__(self, other: Any) -> Self:
        return self._binary("<=", self, other)

    def __gt__(self, other: Any) -> Self:
        return self._binary(">", self, other)

    def __ge__(self, other: Any) -> Self:
        return self._binary(">=", self, other)

    def __neg__(self) -> Self:
        return self._unary("-", self)

    def __invert__(self) -> Self:
        return self._unary("~", self)
