"""The helper names of the spec language: of tensors and elems, and those of `decisions`, `lists`, `coordinates` and `dtypes`. Generated lowerings
import from here what they use.

Sizes and coordinates are `int` or `Expr`; a decision that depends on an unknown size raises `UnsupportedError`, and the node then runs
by the eager kernel. The table of names, with their types, is in `docs/spec-language.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import UnsupportedError
from ...ir.index import Expr, Val, expr, product, proves_less, proves_nonnegative
from ...ir.index import size as canonical
from ...ir.nodes import ITEMSIZE, Node, Size, index_node
from ...ir.pairs import pair, parts
from ...ir.pairs import part as part_of
from . import scalar_ops as s

# Also names of the language:
from .coordinates import (  # noqa: F401
    broadcast,
    broadcasted,
    inferred,
    linear,
    reshaped,
    sliced,
    steps,
    unlinear,
)
from .decisions import (  # noqa: F401
    ceildiv,
    clamped,
    ge,
    greatest,
    gt,
    known,
    le,
    least,
    lt,
)
from .dtypes import (  # noqa: F401
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
from .lists import (  # noqa: F401
    dims_of,
    drop,
    dropped,
    insert,
    inverse,
    kept,
    permuted,
    prod,
    reduced,
    replace,
    reversed,
    swapped,
    unreduced,
    wrap,
    wraps,
)
from .number import Number

inf, nan, pi, e = float("inf"), float("nan"), 3.141592653589793, 2.718281828459045


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
