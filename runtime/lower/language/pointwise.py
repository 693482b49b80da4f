"""What an elementwise entry computes with: its operands at every point, in the dtype that they are promoted to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...ir.index import Expr
from ...ir.nodes import FLOATS, Node, Size
from ...ir.pairs import element
from . import scalar_ops as s
from .dtypes import opmath
from .names import broadcast, broadcasted, float_of, is_number, promoted_dtype
from .tensor import Tensor


class Definitions(Protocol):
    """What an entry needs of the builder."""

    def grid(self, shape: tuple[Size, ...], prefix: str = "i") -> tuple[Expr, ...]:
        """The coordinates of a result of this shape."""
        ...

    def define(self, shape: Sequence[Size], value: Any, dtype: str | None = None) -> Tensor:
        """A tensor whose element at these coordinates is `value`."""
        ...


class Pointwise:
    """Operands of an elementwise entry, as elems in the dtype that the expression computes in (None stays None)."""

    __slots__ = ("_dtype", "_shape", "builder", "common", "operands")

    def __init__(
        self, builder: Definitions, promoted: Sequence[Any], plain: Sequence[Any], promote: str, compute: str | None
    ) -> None:
        self.builder = builder
        everything = [x for x in (*promoted, *plain) if isinstance(x, Tensor)]
        if len(everything) == 1:
            self._shape = list(everything[0].shape)
        else:
            self._shape = broadcast(*(t.shape for t in everything))
        i = builder.grid(tuple(self._shape))
        first = next((x for x in promoted if x is not None), None)
        self.common = (
            first.dtype
            if promote in ("first", "none") and isinstance(first, Tensor)
            else promoted_dtype(*promoted)
            if promoted
            else "bool"
        )
        if promote == "float":
            self.common = float_of(self.common)
        self._dtype = {"bool": "bool", "none": None}.get(promote, self.common)

        def elem(x: Any, common: str | None) -> Any:
            if x is None:
                return None
            if is_number(x):
                d = common or promoted_dtype(x)
                wide = _compute(d, compute)
                # A comparison sees the number as the tensor's dtype has it; arithmetic takes it unrounded, as eager kernels do.
                return s.to_dtype(s.constant(x, d), wide) if promote == "bool" else s.constant(x, wide)
            node = element(x.name, broadcasted(i, x.shape), x.dtype)
            if common is not None:
                node = s.to_dtype(node, common)
            return s.to_dtype(node, _compute(node.dtype, compute))

        keep = None if promote == "none" else self.common
        self.operands = tuple([elem(x, keep) for x in promoted] + [elem(x, None) for x in plain])

    def result(self, value: Any, dtype: str | None = None) -> Tensor:
        """The tensor of `value` at every point, converted to `dtype`, or to what `promote` says."""
        dtype = dtype or self._dtype
        if not isinstance(value, Node):
            value = s.constant(value, dtype or self.common)
        return self.builder.define(self._shape, value, dtype or value.dtype)


def _compute(dtype: str, compute: str | None) -> str:
    if compute == "same" or dtype not in FLOATS:
        return dtype
    return opmath(dtype) if compute is None else compute
