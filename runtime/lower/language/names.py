"""The helper names of the spec language: shapes, coordinates and dtypes. Generated lowerings import from here what they use.

Sizes and coordinates are `int` or `Expr`; a decision that depends on an unknown size raises `UnsupportedError`, and the node then runs
by the eager kernel. The table of names, with their types, is in `docs/spec-language.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any

from ....errors import UnsupportedError
from ...ir.index import Expr, Val, expr, product, proves_less, proves_nonnegative
from ...ir.index import size as canonical
from ...ir.nodes import ITEMSIZE, Node, Size, index_node
from ...ir.pairs import pair, parts
from ...ir.pairs import part as part_of
from ..sizes.positive import from_one
from . import scalar_ops as s
from .dtypes import (  # noqa: F401  (also names of the language)
    category,
    complex_of,
    float_of,
    highest,
    is_bool,
    is_complex,
    is_float,
    is_int,
    is_signed,
    lowest,
    opmath,
    part_dtype,
    promote_types,
    sum_dtype,
    unspecified,
)
from .number import Number

inf, nan, pi, e = float("inf"), float("nan"), 3.141592653589793, 2.718281828459045
_SLICE_END = 2**62  # "to the end" in torch's schemas is the largest int64


# -- tensors -----------------------------------------------------------------------------------------------------------
def shape(t: Any) -> list[Size]:
    """The sizes of a tensor; of a number, none."""
    return list(t.shape) if hasattr(t, "shape") else []


def size(t: Any, d: int) -> Size:
    """Size of dimension `d` (may be negative). A 0-dim tensor has size 1 everywhere, as for torch's dimension arguments."""
    return t.shape[wrap(d, len(t.shape))] if t.shape else 1


def rank(t: Any) -> int:
    return len(t.shape) if hasattr(t, "shape") else 0


def numel(t: Any) -> Size:
    return product(t.shape)


def is_on_gpu(t: Any) -> bool:
    """Whether the program that the tensor belongs to runs on a GPU."""
    return bool(t.builder.device != "cpu")


def pays_as_loops(t: Any, n: Size) -> bool:
    """Whether `n` multiply-adds are so few that loops take less time than the call of a library (setting `loop_products`). What a GPU
    waits for is the launch, and a call has one as well; of unknown sizes the large ones matter.
    """
    return not is_on_gpu(t) and is_known(n) and known(n) <= t.builder.products


def rows_in_registers(t: Any, dim: Any, n: int, across: int) -> bool:
    """Whether a GPU has rows of `t` along a dimension in registers, with their places: at most `n` elements (a known number) of 32 bits, or `across`
    of them where it is not the last dimension.
    """
    if not is_on_gpu(t) or not rank(t) or ITEMSIZE.get(t.dtype, 8) > 4:
        return False
    found = size(t, dim)
    return is_known(found) and 0 < known(found) <= (n if dim % rank(t) == rank(t) - 1 else across)


def was_row_major(t: Any) -> bool:
    """Whether an argument of the operator was row-major when it was traced: some eager kernels then compute from its transpose."""
    return bool(t.builder.row_major.get(t.name, True))


def dtype(x: Any) -> str:
    """The dtype of a tensor or elem; the dtype that a Python number stands for."""
    if isinstance(x, bool):
        return "bool"
    if isinstance(x, (int, Expr)):
        return "int64"
    if isinstance(x, complex):
        return "complex64"
    return "float32" if isinstance(x, float) else x.dtype


def is_number(x: Any) -> bool:
    return isinstance(x, (bool, int, float, complex, Expr, Number))


def is_known(x: Any) -> bool:
    """Whether a size or another number is one and the same in every call."""
    return x.is_const if isinstance(x, Expr) else not isinstance(x, Number)


def is_nonzero(x: Any) -> bool:
    """Whether a number is not 0; False where that is not known before the program runs."""
    if isinstance(x, Expr):
        return proves_less(x, expr(0)) or proves_less(expr(0), x)
    return bool(x != 0)


def number(x: Size) -> Size:
    return canonical(x)


# -- decisions ---------------------------------------------------------------------------------------------------------
def lt(a: Size, b: Size) -> bool:
    """`a < b`, if it can be told."""
    if isinstance(a, Expr) or isinstance(b, Expr):
        if isinstance(a, float) or isinstance(b, float):
            raise UnsupportedError(f"whether {a} < {b} is not known before the program runs")
        x, y = expr(a), expr(b)
        if proves_less(x, y):
            return True
        if proves_nonnegative(x - y):
            return False
        if (found := from_one(x, y)) is not None and proves_less(*found):
            return True
        if found is not None and proves_nonnegative(found[0] - found[1]):
            return False
        raise UnsupportedError(f"whether {x} < {y} is not known before the sizes are")
    return a < b


def le(a: Size, b: Size) -> bool:
    return not lt(b, a) if isinstance(a, Expr) or isinstance(b, Expr) else a <= b


def gt(a: Size, b: Size) -> bool:
    return lt(b, a)


def ge(a: Size, b: Size) -> bool:
    return le(b, a)


def least(*values: Any) -> Size:
    """The smallest of indices, given one by one or as a list."""
    items = values if len(values) > 1 else tuple(values[0])
    best = items[0]
    for x in items[1:]:
        best = x if lt(x, best) else best
    return best


def greatest(*values: Any) -> Size:
    items = values if len(values) > 1 else tuple(values[0])
    best = items[0]
    for x in items[1:]:
        best = x if lt(best, x) else best
    return best


def clamped(x: Size, lo: Size, hi: Size) -> Size:
    return least(greatest(x, lo), hi)


def ceildiv(a: Size, b: Size) -> Size:
    return canonical(-((-expr(a)) // b)) if isinstance(a, Expr) or isinstance(b, Expr) else -(-a // b)


def known(x: Size) -> int:
    """An index as a Python int."""
    if isinstance(x, Expr):
        if not x.is_const:
            raise UnsupportedError(f"{x} is not known before the sizes are")
        return int(x)
    return x


# -- lists -------------------------------------------------------------------------------------------------------------
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


# -- shapes and coordinates --------------------------------------------------------------------------------------------
def broadcast(*shapes: Sequence[Size]) -> list[Size]:
    """The common shape. Two sizes must be equal expressions, or one of them 1."""
    n = max((len(each) for each in shapes), default=0)
    out: list[Size] = [1] * n
    for each in shapes:
        for k, x in enumerate(each, n - len(each)):
            if out[k] == 1:
                out[k] = x
            elif x != 1 and x != out[k]:
                raise UnsupportedError(f"sizes {out[k]} and {x} are not known to be equal")
    return out


def broadcasted(i: Sequence[Size], shape_: Sequence[Size]) -> list[Size]:
    """Coordinates for an operand of `shape_` from those of the common shape. Raises UnsupportedError where it does not broadcast to that, or where
    symbolic sizes leave it open.
    """
    if len(shape_) > len(i):
        raise UnsupportedError(f"{list(shape_)} has more dimensions than what it is broadcast to")
    tail = i[len(i) - len(shape_) :]
    for x, n in zip(tail, shape_, strict=True):
        extent = 1 if isinstance(x, int) else n if x.var is None else x.var.extent
        if n not in (1, extent):
            raise UnsupportedError(f"{n} elements are not broadcast to {extent}")
    return [0 if n == 1 else x for x, n in zip(tail, shape_, strict=True)]


def inferred(values: Sequence[Size], n: Size) -> list[Size]:
    """A shape with a single -1 replaced so that it holds `n` elements."""
    values = [canonical(x) for x in values]
    if -1 not in values:
        return values
    rest = product(x for x in values if x != -1)
    if rest == 0:
        raise UnsupportedError("a -1 size of an empty tensor is ambiguous")
    return [canonical(expr(n) // rest) if x == -1 else x for x in values]


def linear(i: Sequence[Size], shape_: Sequence[Size]) -> Size:
    """Row-major position of the coordinates `i` in `shape_`."""
    at: Size = 0
    for x, n in zip(i, shape_, strict=True):
        at = at * n + x if at != 0 else x
    return at


def unlinear(at: Size, shape_: Sequence[Size]) -> list[Size]:
    """Coordinates in `shape_` of the row-major position `at`, which must be inside."""
    if 0 in shape_:
        return [0] * len(shape_)  # no position is inside, and no loop goes there
    out: list[Size] = []
    step: Size = 1
    alone = all(n == 1 for n in shape_)
    for k in range(len(shape_) - 1, -1, -1):
        n = shape_[k]
        if n == 1:
            out.append(at if alone and not out else 0)  # `at` may be a position that is to be checked
            continue
        digit = expr(at) // step
        if any(x != 1 for x in shape_[:k]):
            digit = digit % n
        out.append(digit)
        step = canonical(expr(step) * n)
    return out[::-1]


def reshaped(i: Sequence[Size], to_: Sequence[Size], shape_: Sequence[Size]) -> list[Size]:
    """Coordinates in `shape_` of the element at `i` in the shape `to_`, where both hold the same elements in row-major order.

    Dimensions are matched in the smallest groups of equal product, so that untouched ones keep their variable.
    """
    if 0 in shape_ or 0 in to_:
        return [0] * len(shape_)
    out: list[Size] = []
    a, b = len(to_), len(shape_)
    while a > 0 or b > 0:
        a0, b0 = a - 1, b - 1
        pa: Size = to_[a0] if a0 >= 0 else 1
        pb: Size = shape_[b0] if b0 >= 0 else 1
        while pa != pb:
            if b0 > 0 and (a0 <= 0 or _smaller(pb, pa)):
                b0 -= 1
                pb = canonical(expr(pb) * shape_[b0])
            elif a0 > 0:
                a0 -= 1
                pa = canonical(expr(pa) * to_[a0])
            elif isinstance(pa, int) and isinstance(pb, int):
                raise UnsupportedError(f"shapes {list(to_)} and {list(shape_)} do not hold as many elements")
            else:
                break  # what is left on both sides are as many elements by a guard
        a0, b0 = max(a0, 0), max(b0, 0)
        if b > b0:
            group = shape_[b0:b]
            if a - a0 == 1 and b - b0 == 1:
                out = [expr(i[a0]) if shape_[b0] != 1 else 0, *out]
            else:
                out = [*unlinear(linear(i[a0:a], to_[a0:a]), group), *out]
        a, b = a0, b0
    return out


def _smaller(a: Size, b: Size) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    # Which side grows next is only a search order: a wrong guess makes the group larger, never the result wrong.
    return len(str(a)) < len(str(b)) if not isinstance(a, int) or not isinstance(b, int) else a < b


def steps(start: Any, end: Any, step: Any) -> Size:
    """How many of start, start + step, … come before `end`."""
    if isinstance(start, float) or isinstance(end, float) or isinstance(step, float):
        if not all(isinstance(x, (int, float)) for x in (start, end, step)):
            raise UnsupportedError("a range of floats and unknown sizes")
        return max(ceil((end - start) / step), 0)
    if isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
        return max(-((start - end) // step), 0)
    return ceildiv(expr(end) - start, step)


def sliced(start: Size | None, end: Size | None, n: Size) -> list[Size]:
    """`[start, end]` of a slice of `n` elements. An unknown size is taken to be large enough: the traced shape tells if it is not."""

    def bound(x: Size) -> Size:
        if isinstance(x, int) and x >= _SLICE_END:
            return n
        if isinstance(x, int) and x < 0:
            x = canonical(x + n)
        if isinstance(x, Expr) or isinstance(n, Expr):
            return x
        return min(max(x, 0), n)

    first = bound(0 if start is None else start)
    last = bound(_SLICE_END if end is None else end)
    return [first, last] if isinstance(first, Expr) or isinstance(last, Expr) else [first, max(first, last)]


def promoted_dtype(*values: Any) -> str:
    """The common dtype of tensors and Python numbers: a 0-dim tensor counts only if its category is higher, a number less still."""
    best: list[str | None] = [None, None, None]
    for x in values:
        if x is None:
            continue
        d = dtype(x)
        level = 2 if is_number(x) else 1 if not shape(x) else 0
        best[level] = d if best[level] is None else promote_types(best[level], d)  # type: ignore[arg-type]
    result: str | None = None
    for d in filter(None, (best[2], best[1], best[0])):
        result = d if result is None else promote_types(d, result) if category(result) > category(d) else d
    if result is None:
        raise UnsupportedError("nothing to promote")
    return result


def real(n: Size) -> float | Number:
    """A size as a number, which is of no integers: it may be divided, and take part in what floats do."""
    return float(n) if isinstance(n, int) else Number(Node("to_dtype", (index_node(n),), "float64"))


# -- elems -------------------------------------------------------------------------------------------------------------
def value_of(x: Size) -> Node:
    """An index (usually a coordinate) as an int64 elem."""
    return index_node(x)


def re(x: Any) -> Any:
    """The real part of an elem."""
    return parts(x)[0]


def im(x: Any) -> Any:
    """The imaginary part of an elem; 0 of a real one."""
    return parts(x)[1]


def paired(real: Any, imag: Any) -> Any:
    """The complex elem of two parts, of which one is an elem."""
    dtype_ = next(x.dtype for x in (real, imag) if isinstance(x, Node))
    return pair(s.constant(real, dtype_), s.constant(imag, dtype_))


def part(x: Any, k: Size) -> Any:
    """The real part of an elem where k is 0, the imaginary one where it is 1."""
    return part_of(x, expr(k))


def within(x: Size, lo: Size, hi: Size) -> Any:
    """Whether lo <= x < hi, as an elem; True when that is known."""
    at: Any = True
    if not proves_nonnegative(expr(x) - lo):
        at = s.ge(value_of(x), expr(lo))
    if not proves_less(expr(x), expr(hi)):
        upper = s.lt(value_of(x), expr(hi))
        at = upper if at is True else s.logical_and(at, upper)
    return at


def inside(coords: Sequence[Size], shape_: Sequence[Size]) -> Any:
    """Whether every coordinate is within its size, as an elem; True when that is known."""
    at: Any = True
    for x, n in zip(coords, shape_, strict=True):
        one = within(x, 0, n)
        at = one if at is True else at if one is True else s.logical_and(at, one)
    return at


def to(x: Any, d: str) -> Any:
    """An elem or a tensor converted to dtype `d`."""
    return s.to_dtype(x, d) if isinstance(x, Node) or is_number(x) else x.builder.to(x, d)


def has_values(x: Size) -> bool:
    """Whether an index depends on tensor data."""
    return isinstance(x, Expr) and any(isinstance(a, Val) for a in x.atoms())
