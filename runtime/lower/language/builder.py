"""What generated lowerings call: `Builder` turns coordinates and scalar expressions into nests.

The printed form of every kind of spec entry, and the meaning of the methods, is in `docs/spec-language.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from ....errors import UnsupportedError
from ....generated.kernels import GPU_ROUTINES
from ....generated.scalars import REDUCTIONS, SCANS
from ...ir.guards import demanded, masked
from ...ir.index import Expr, Sym, Var, expr, product, proves_less
from ...ir.index import size as canonical
from ...ir.learned import Learned
from ...ir.nodes import (
    DTYPES,
    Buffer,
    Extern,
    Nest,
    Node,
    Ref,
    Scatter,
    Size,
    contiguous_strides,
    indirect,
)
from ...ir.pairs import PART, outside, part
from ...ir.routines import PREFIX
from ..sizes.empty import reads_nothing
from . import scalar_ops as s
from .dtypes import complex_of, part_dtype
from .elems import Elems
from .names import opmath, promoted_dtype
from .pointwise import Pointwise
from .tensor import NotNativeError, Tensor


class Builder(Elems):
    """Collects the items of a program. `prefix` names the buffers defined next, `origin` says where they come from.

    checks  positions that data brings are checked where nothing proves them in range; `place` goes into the errors.
    device  where the program will run: eager's kernels for a GPU give some results another dtype.
    atomic  dtypes of which indexed sums have a form, where no other indexed update has one; None: all have.
    unordered  where several values are set at one position, any one may stay: so are eager's kernels for a GPU.
    products  multiply-adds up to which a product that a library has is computed in loops.
    complex_  overloads whose lowerings take complex tensors.
    """

    def __init__(
        self,
        lowerings: Mapping[str, Callable[..., Any]] | None = None,
        operators: Mapping[str, str] | None = None,
        checks: bool = True,
        device: str = "cpu",
        atomic: Container[str] | None = None,
        products: int = 0,
        complex_: Container[str] | None = None,
        unordered: bool = False,
    ) -> None:
        if lowerings is None or operators is None:
            from ....generated import ops

            lowerings = ops.LOWERINGS if lowerings is None else lowerings
            operators = ops.OPERATORS if operators is None else operators
            complex_ = ops.COMPLEX if complex_ is None else complex_
        super().__init__(checks)
        self.lowerings, self.operators, self.complex = lowerings, operators, complex_ or ()
        self.items: list[Nest | Extern] = []
        self.prefix = "t"
        self.origin = ""
        self.device, self.atomic = device, atomic
        self.products, self.unordered = products, unordered
        self.row_major: dict[str, bool] = {}  # of arguments, as they were traced
        self._calls = 0  # lowerings under way that others called
        self._names: dict[str, int] = {}

    # -- names ---------------------------------------------------------------------------------------------------------
    def fresh(self, name: str) -> str:
        """`name`, or `name_2`, `name_3`, … when it is taken."""
        while name in self._names:
            self._names[name] += 1
            name = f"{name}_{self._names[name]}"
        self._names[name] = 1
        return name

    def _add(self, nest: Nest, shape: tuple[Size, ...]) -> Tensor:
        """The tensor of a nest; one of fewer dimensions is complex."""
        self.items.append(nest)
        return Tensor(nest.name, shape, nest.dtype if len(shape) == len(nest.shape) else complex_of(nest.dtype), self)

    def mark(self) -> int:
        """A state to `rewind` to when a lowering fails half-way."""
        return len(self.items)

    def rewind(self, mark: int) -> None:
        """Drop the nests defined since `mark`, and free their names."""
        for item in self.items[mark:]:
            if isinstance(item, Nest):
                del self._names[item.name]
        del self.items[mark:]

    def check_empty(self, mark: int) -> None:
        """Raises `UnsupportedError` where a nest defined since `mark` reads memory that is not there if a size from data is 0."""
        for item in self.items[mark:] if self.may_be_empty else ():
            found = reads_nothing(item, self._shapes, self.may_be_empty) if isinstance(item, Nest) else None
            if found is not None:
                raise UnsupportedError(f"it reads {found}, whose size comes from data and may be 0")

    # -- decisions -----------------------------------------------------------------------------------------------------
    def native_if(self, condition: Any, text: str) -> None:
        if not condition:
            raise NotNativeError(f"not native unless {text}")

    def require(self, condition: Any, text: str) -> None:
        """Eager raises where the condition does not hold: its kernel runs, and does so. (What calls this operator may have another.)"""
        if self._calls:
            self.native_if(condition, text)
        elif not condition:
            raise UnsupportedError(f"eager raises unless {text}")

    def begin(self, prefix: str, origin: str, place: str = "") -> None:
        """What comes next is one node of the graph: names of its buffers, where it comes from, and what its errors say."""
        self.prefix, self.origin, self.place, self._error = prefix, origin, place or origin, None

    def call(self, op: str, *args: Any, **kwargs: Any) -> Any:
        """The lowering of another operator, `namespace.name.overload`, on tensors of this builder."""
        lowering = self.lowerings.get(op)
        if lowering is None or (op not in self.complex and any(_is_complex(a) for a in (*args, *kwargs.values()))):
            raise UnsupportedError(f"{op} has no lowering of its own here")
        prefix, error, self._calls = self.prefix, self._error, self._calls + 1
        self.prefix = f"{prefix}_{op.split('.')[1].strip('_')}"
        try:
            return lowering(self, *args, **kwargs)
        finally:
            self.prefix, self._error, self._calls = prefix, error, self._calls - 1

    # -- conditions ----------------------------------------------------------------------------------------------------
    def demanded(self, t: Tensor, holds: Tensor, error: str, says: str) -> Tensor:
        """`t`; where `holds`, of the same sizes, does not hold somewhere the graph raises `error` when it runs."""
        return self.each(t, lambda _: self.at(holds, self.coords(t.shape)), error, says)

    def each(self, t: Any, holds: Callable[[Node], Any], error: str, says: str) -> Any:
        """`t` (or None); where the condition does not hold of an element the graph raises `error` when it runs. (It may hold of all by what is
        known now.)
        """
        if t is None or not self.checks or self._error == "nothing":
            return t
        at = self.coords(t.shape)
        value = self.at(t, at)
        met = holds(value)
        if met is True:
            return t
        return self.define(t.shape, demanded(value, met, error, f"{says}: {self.place}"), t.dtype)

    # -- definitions ---------------------------------------------------------------------------------------------------
    def pointwise(
        self,
        promoted: Sequence[Any],
        *,
        plain: Sequence[Any] = (),
        promote: str = "default",
        compute: str | None = None,
    ) -> Pointwise:
        return Pointwise(self, promoted, plain, promote, compute)

    def define(self, shape: Sequence[Size], value: Any, dtype: str | None = None) -> Tensor:
        """A tensor whose element at `coords(shape)` is `value`, converted to `dtype` when given."""
        shape = tuple(map(canonical, shape))
        if not isinstance(value, Node):
            value = s.constant(value, dtype or promoted_dtype(value))
        if 0 in shape:  # no element at all
            value = s.constant(0, value.dtype)
        if dtype is not None:
            value = s.to_dtype(value, _checked(dtype))
        shape_, vars_, value = self._parts(shape, value)
        return self._add(Nest(self.fresh(self.prefix), shape_, value.dtype, vars_, value, origin=self.origin), shape)

    def _parts(self, shape: tuple[Size, ...], value: Node) -> tuple[tuple[Size, ...], tuple[Expr, ...], Node]:
        """Shape, coordinates and value of the nest that defines a tensor: of a complex one with the dimension of its parts."""
        if value.dtype not in PART:
            return shape, self.grid(shape), value
        vars_ = self.grid((*shape, 2))
        return (*shape, 2), vars_, part(value, vars_[-1])

    def to(self, t: Tensor, dtype: str) -> Tensor:
        """`t` converted to `dtype`; `t` itself when it has it."""
        return t if t.dtype == dtype else self.define(t.shape, self.at(t, self.coords(t.shape)), dtype)

    def reduce(
        self,
        kind: str,
        shape: Sequence[Size],
        r: Sequence[Size],
        value: Any,
        dtype: str | None = None,
        exact: bool = False,
    ) -> Tensor:
        """The reduction of `value` over `r`. Float16 and bfloat16 accumulate in float32 and are rounded at the end unless `exact`."""
        shape = tuple(map(canonical, shape))
        rvars = tuple(x.var for x in map(expr, r) if x.var is not None)
        self._may_reduce(kind, rvars)
        if value.dtype in PART or (dtype or "") in PART:
            return self._reduce_parts(kind, shape, rvars, s.to_dtype(value, dtype or value.dtype))
        before = value.dtype
        accumulates, result = s.reduction(kind, dtype or before, before)
        value = s.to_dtype(value, accumulates)
        final = result if exact else dtype or (before if result == accumulates else result)
        if not rvars:
            return self.define(shape, s.reduction_of_one(kind, value), final)
        name = self.fresh(self.prefix if final == result and not exact else f"{self.prefix}_acc")
        nest = Nest(name, shape, result, self.grid(shape), value, rvars=rvars, reduce=kind, origin=self.origin)
        return self.to(self._add(nest, shape), final)

    def _reduce_parts(self, kind: str, shape: tuple[Size, ...], rvars: tuple[Any, ...], value: Node) -> Tensor:
        """The sum of complex elems: the sums of their parts."""
        if kind != "sum":
            raise UnsupportedError(f"{kind} over complex numbers")
        if not rvars:
            return self.define(shape, value)
        all_, vars_, value = self._parts(shape, value)
        name = self.fresh(self.prefix)
        nest = Nest(name, all_, value.dtype, vars_, value, rvars=rvars, reduce=kind, origin=self.origin)
        return self._add(nest, shape)

    def _may_reduce(self, kind: str, rvars: Sequence[Var | None]) -> None:
        """Eager refuses the greatest of no elements, by an error that a loop over none would not raise."""
        sizes = {a.name for v in rvars if v is not None for a in expr(v.extent).atoms() if isinstance(a, Sym)}
        if REDUCTIONS[kind].identity.get("int") in ("lowest", "highest") and not sizes.isdisjoint(self.may_be_empty):
            raise NotNativeError(f"{kind} over a size from data, which may be 0")

    def scan(self, kind: str, shape: Sequence[Size], dim: int, value: Any, dtype: str | None = None) -> Tensor:
        """The running reduction of `value` along `dim`, accumulated as `reduce` does."""
        shape = tuple(map(canonical, shape))
        final = dtype or value.dtype
        accumulates = opmath(final)
        value = s.to_dtype(value, accumulates)
        if not shape:
            return self.define(shape, value, final)
        value = s.started(SCANS[kind], value)  # a kernel may leave the first element as it is
        if shape[dim] == 1:
            return self.define(shape, value, final)
        name = self.fresh(f"{self.prefix}_acc" if final != accumulates else self.prefix)
        if value.dtype in PART and kind != "sum":
            raise UnsupportedError(f"a running {kind} of complex numbers")
        all_, vars_, value = self._parts(shape, value)
        nest = Nest(name, all_, value.dtype, vars_, value, scan=kind, scan_dim=dim, origin=self.origin)
        return self.to(self._add(nest, shape), final)

    def scatter(
        self, base: Tensor, r: Sequence[Size], value: Any, into: Sequence[Size], mode: str = "set", when: Any = None
    ) -> Tensor:
        """A copy of `base` in which, for every point of `r` in order (where `when`), the element at `into` is set to or combined with `value`.

        Float16 and bfloat16 are added and multiplied in float32, since many values may meet in one element, unless the
        values are so few that passes over the whole of `base` would be most of the work.
        """
        kind = opmath(base.dtype)
        if mode in ("sum", "prod") and kind != base.dtype and not _few(r, base):
            wide = self.scatter(self.to(base, kind), r, s.to_dtype(value, base.dtype), into, mode, when)
            return self.to(wide, base.dtype)
        unordered = self.unordered and mode == "set"
        if self.atomic is not None and not (unordered or (mode == "sum" and part_dtype(base.dtype) in self.atomic)):
            raise UnsupportedError(
                f"an indexed update by {mode!r} of {base.dtype} has no atomic form that gives eager's values"
            )
        value = s.to_dtype(value, base.dtype)
        shape = base.shape
        if base.dtype in PART:
            if mode not in ("set", "sum"):
                raise UnsupportedError(f"an indexed update by {mode!r} of complex numbers")
            (which,) = self.grid((2,), "c")
            shape, r, into, value = (*shape, 2), [*r, which], [*into, which], part(value, which)
        domain = tuple(x.var for x in map(expr, r) if x.var is not None)
        index = tuple(map(expr, into))
        if when is not None:  # a position that is skipped is no error
            index = tuple(e.subst({}, lambda v: indirect(masked(v.node, when), v.lo, v.hi)) for e in index)
        scatter = Scatter(base.name, index, mode, domain, when, unordered)
        name = self.fresh(self.prefix)
        nest = Nest(name, shape, value.dtype, self.grid(shape), value, scatter=scatter, origin=self.origin)
        return self._add(nest, base.shape)

    def routine(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outs: Sequence[tuple[Sequence[Size], str]],
        numbers: Sequence[Any] = (),
    ) -> list[Tensor]:
        """Results of these shapes and dtypes by a routine, `file.function`, which is given the inputs with their strides, and numbers."""
        if self.device != "cpu" and name not in GPU_ROUTINES:
            raise NotNativeError(f"the routine {name} is for a processor")
        if self.device != "cpu" and any(isinstance(n, Expr) and not n.is_const for n in numbers[1:]):
            raise NotNativeError(f"on a GPU the routine {name} needs numbers that are known")
        made = []
        for k, (sizes, kind) in enumerate(outs):
            shape = tuple(map(canonical, sizes))
            named = self.fresh(self.prefix if len(outs) == 1 else f"{self.prefix}_{k}")
            made.append(Buffer(named, shape, _checked(kind), contiguous_strides(shape)))
        args = (*(Ref(t.name) for t in inputs), *numbers)
        return self.extern(made, PREFIX + name, args, (), len(made) == 1, compiled=True)

    def extern(
        self,
        outs: Sequence[Buffer],
        target: str,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...],
        single: bool,
        effect: bool = False,
        places: tuple[int, ...] = (),
        compiled: bool = False,
        writes: int = 0,
        learns: tuple[Learned, ...] = (),
        whole: bool = False,
        elsewhere: bool = False,
    ) -> list[Tensor]:
        """A call of an eager kernel (`compiled`: of a function that comes with the program) with results `outs`, at `places` among all its
        results when there are others; with an `effect` it runs even if nothing uses them; `writes`, `whole`, `elsewhere`: as in `Extern`. It `learns`
        sizes.
        """
        about = places, compiled, writes, learns, (), whole, elsewhere
        call = Extern(tuple(outs), target, args, kwargs, single, effect, self.origin, *about)
        self.items.append(call)
        return [self.tensor(o) for o in outs]

    def tensor(self, buffer: Buffer) -> Tensor:
        """The handle of a buffer that the program does not define itself."""
        seen = outside(buffer)
        return Tensor(seen.name, seen.shape, seen.dtype, self, buffer.paired)


def _checked(dtype: str) -> str:
    if dtype not in DTYPES and dtype not in PART:
        raise UnsupportedError(f"dtype {dtype} has no loop code")
    return dtype


def _few(r: Sequence[Size], base: Tensor) -> bool:
    """Are the points of `r` known to be less than an eighth of the elements?"""
    return proves_less(
        expr(product(x.var.extent for x in map(expr, r) if x.var is not None)) * 8, expr(product(base.shape))
    )


def _is_complex(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(map(_is_complex, x))
    return isinstance(x, complex) or (isinstance(x, Tensor) and x.dtype in PART)
