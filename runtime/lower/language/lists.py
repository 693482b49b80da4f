"""Lists in the spec language: dimensions, and what there is for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ....errors import UnsupportedError
from ...ir.index import Expr, product
from ...ir.nodes import Size
from .decisions import known


def prod(values: Iterable[Size]) -> Size:
    return product(values)


def wrap(d: int, n: int) -> int:
    """A dimension as 0..n-1; a 0-dim tensor counts as having one dimension."""
    n = max(n, 1)
    if not -n <= known(d) < n:
        raise UnsupportedError(f"dimension {d} is out of range for rank {n}")
    return known(d) % n


def wraps(dims: Any, n: int) -> list[int]:
    return [wrap(known(d), n) for d in ([dims] if isinstance(dims, (int, Expr)) else dims)]


def dims_of(dims: Any, n: int) -> list[int]:
    """As `wraps`, in ascending order; None and the empty list mean all dimensions. A 0-dim tensor has none."""
    if dims is None or (not isinstance(dims, (int, Expr)) and len(dims) == 0):
        return list(range(n))
    return sorted(set(wraps(dims, n))) if n else []


def reversed(values: Sequence[Any]) -> list[Any]:
    return list(values[::-1])


def drop(values: Sequence[Any], d: int) -> list[Any]:
    return [*values[:d], *values[d + 1 :]]


def insert(values: Sequence[Any], d: int, x: Any) -> list[Any]:
    return [*values[:d], x, *values[d:]]


def replace(values: Sequence[Any], d: int, x: Any) -> list[Any]:
    """The list with entry `d` replaced; an empty list (of a 0-dim tensor) stays empty."""
    return [*values[:d], x, *values[d + 1 :]] if values else []


def permuted(values: Sequence[Any], dims: Sequence[int]) -> list[Any]:
    return [values[d] for d in dims]


def inverse(dims: Sequence[int]) -> list[int]:
    out = [0] * len(dims)
    for k, d in enumerate(dims):
        out[d] = k
    return out


def swapped(values: Sequence[Any], a: int, b: int) -> list[Any]:
    out = list(values)
    if out:
        out[a], out[b] = out[b], out[a]
    return out


def kept(values: Sequence[Any], dims: Sequence[int]) -> list[Any]:
    return [x for k, x in enumerate(values) if k in dims]


def dropped(values: Sequence[Any], dims: Sequence[int]) -> list[Any]:
    return [x for k, x in enumerate(values) if k not in dims]


def reduced(values: Sequence[Size], dims: Sequence[int], keepdim: bool) -> list[Size]:
    if keepdim:
        return [1 if k in dims else n for k, n in enumerate(values)]
    return dropped(values, dims)


def unreduced(i: Sequence[Size], r: Sequence[Size], dims: Sequence[int], keepdim: bool) -> list[Size]:
    """Coordinates of a reduction's operand. `r` has one entry per entry of `dims`, in their order."""
    n = len(i) if keepdim else len(i) + len(dims)
    rest = iter(x for k, x in enumerate(i) if not keepdim or k not in dims)
    return [r[dims.index(k)] if k in dims else next(rest) for k in range(n)]
