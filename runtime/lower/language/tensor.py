"""Tensors while an operator is lowered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ....errors import UnsupportedError
from ...ir.index import expr
from ...ir.index import size as canonical
from ...ir.nodes import Size
from ...ir.pairs import PART


class NotNativeError(UnsupportedError):
    """The condition of an entry does not hold: the eager kernel is meant to run."""


class Lowerings(Protocol):
    """What calls an entry's lowering: the builder of the tensor's program."""

    operators: Mapping[str, str]

    def call(self, op: str, *args: Any, **kwargs: Any) -> Any:
        """What the lowering of `op` returns."""
        ...


class Tensor:
    """A buffer while lowering: `name`, `shape` (ints and `Expr`s), `dtype` (a string) and the builder that defined it. Of a complex one these
    are the tensor's: its buffer holds the parts (`ir.pairs`).
    """

    __slots__ = ("builder", "dtype", "is_paired", "name", "shape")

    def __init__(
        self, name: str, shape: Iterable[Size], dtype: str, builder: Lowerings, paired: bool | None = None
    ) -> None:
        self.name, self.shape, self.dtype, self.builder = name, tuple(map(canonical, shape)), dtype, builder
        self.is_paired = dtype in PART if paired is None else paired

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"

    def strides(self, stride: tuple[Size, ...]) -> tuple[Size, ...]:
        """Those of the buffer, for strides of the tensor."""
        return (*(canonical(expr(n) * 2) for n in stride), 1) if self.is_paired else stride

    def _operator(self, symbol: str, a: Any, b: Any) -> Any:
        op = self.builder.operators.get(symbol)
        if op is None:
            raise UnsupportedError(f"no operator entry has the symbol {symbol!r}")
        return self.builder.call(op, a, b)

    def __add__(self, other: Any) -> Any:
        return self._operator("+", self, other)

    def __radd__(self, other: Any) -> Any:
        return self._operator("+", self, other)

    def __sub__(self, other: Any) -> Any:
        return self._operator("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._operator("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return self._operator("*", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._operator("*", self, other)

    def __truediv__(self, other: Any) -> Any:
        return self._operator("/", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._operator("/", other, self)

    def __pow__(self, other: Any) -> Any:
        return self._operator("**", self, other)

    def __and__(self, other: Any) -> Any:
        return self._operator("&", self, other)

    def __or__(self, other: Any) -> Any:
        return self._operator("|", self, other)

    def __lt__(self, other: Any) -> Any:
        return self._operator("<", self, other)

    def __le__(self, other: Any) -> Any:
        return self._operator("<=", self, other)

    def __gt__(self, other: Any) -> Any:
        return self._operator(">", self, other)

    def __ge__(self, other: Any) -> Any:
        return self._operator(">=", self, other)

    def __neg__(self) -> Any:
        return self._operator("*", self, -1)


__all__ = ["NotNativeError", "Tensor"]
