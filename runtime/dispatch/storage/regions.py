"""What the traced program's tensors are made of: regions of storage, and values that are views of them.

A `Region` is the piece of storage that one tensor brought into the program: an input, a merged base of inputs that
overlap, or a fresh result. Its `version` counts the writes to it. A `Value` is one tensor object: the region's whole
(no parent), or a view of another value. A value's node is right while its version is the region's; after that the
node is made again from the parent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

# Named tensors ended with torch 2.12.
_HAS_NAMES: Callable[[torch.Tensor], bool] | None = getattr(torch.Tensor, "has_names", None)


def is_strided(value: Any) -> bool:
    """Whether a value is no tensor, or one with strides."""
    return not isinstance(value, torch.Tensor) or value.layout is torch.strided


def beyond_strides(t: torch.Tensor) -> str:
    """What an eager kernel knows of a tensor besides elements at strides, which is all that is traced; "" where there is nothing."""
    if t.layout is not torch.strided:
        return f"has the layout {t.layout}"
    if t.is_quantized:
        return f"holds quantized numbers ({t.dtype})"
    if t.is_nested:
        return "is nested"
    return "has named dimensions" if _HAS_NAMES is not None and _HAS_NAMES(t) else ""


@dataclass(frozen=True)
class Layout:
    """Where a tensor lies in its storage: dtype, sizes, strides, offset (in elements), and whether it is a lazy
    conjugate or negative.
    """

    dtype: torch.dtype
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    conj: bool = False
    neg: bool = False

    @classmethod
    def of(cls, t: torch.Tensor) -> Layout:
        """The layout of a strided tensor."""
        return cls(t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.is_conj(), t.is_neg())

    @property
    def plain(self) -> bool:
        """Whether all sizes and strides are known integers."""
        return all(type(v) is int for v in (*self.size, *self.stride, self.offset))

    def key(self) -> tuple[Any, ...]:
        """Hashable; two layouts with the same key are the same for all values of the size symbols."""
        if self.plain:
            return (self.dtype, self.size, self.stride, self.offset, self.conj, self.neg)
        return (
            self.dtype,
            expressions(self.size),
            expressions(self.stride),
            expressions((self.offset,)),
            self.conj,
            self.neg,
        )

    def strides_key(self) -> tuple[Any, ...]:
        """Hashable; the strides as they are known."""
        return expressions(self.stride)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.size)} stride {list(self.stride)} offset {self.offset}"


def expressions(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes or strides without their guards: numbers, and expressions of the size symbols."""
    return tuple(v.node.expr if isinstance(v, torch.SymInt) else v for v in values)


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape lay their elements out alike (strides of dimensions of size one do not
    matter).
    """
    pairs = zip(a.shape, expressions(a.stride()), expressions(b.stride()), strict=True)
    return all(x == y or (type(n) is int and n <= 1) for n, x, y in pairs)


@dataclass(eq=False, slots=True)
class Step:
    """The view that made a value of its parent: `op(*args, **kwargs)`, whose argument `position` is the parent,
    result `index` of it.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    position: int = 0
    index: int | None = None


@dataclass(eq=False, slots=True)
class Region:
    """See the module. `inputs` are the flat input positions whose elements it holds; `key` names the storage."""

    key: int
    storage: Any
    inputs: tuple[int, ...] = ()
    version: int = 0
    bumps: int = 0
    """How often eager's version counter moves: also where a tensor is only laid out anew."""
    loose: bool = False
    """Some value reaches outside of the region (`as_strided` beyond an input's own elements)."""
    constant: bool = False
    bytes: Any = None
    """Size of the storage when the region was made."""

    def __post_init__(self) -> None:
        self.bytes = self.storage.nbytes()

    @property
    def resized(self) -> bool:
        """Whether the size of the storage has changed behind the back of operators (`untyped_storage().resize_`)."""
        return expressions((self.storage.nbytes(),)) != expressions((self.bytes,))


class _NoStorage:
    """In the place of the storage of a sparse tensor."""

    def nbytes(self) -> int:
        return 0


@dataclass(eq=False, slots=True)
class Value:
    """See the module. `layout` is the tensor's place in its storage in eager; `step` is None for a pure alias."""

    region: Region
    node: Any
    layout: Layout
    parent: Value | None = None
    step: Step | None = None
    version: int = 0
    written: tuple[fx.Node, fx.Node] | None = None
    """The parent's node before and after this value was last written into it."""
    born: int = 0
    """The region's version when the tensor object was made."""
    bumps: int = 0
    """Those of the region then."""
    near: Value | None = None
    """What `as_strided` was called on, where that made the value: autograd knows it as a view of that, although it reads the whole region."""

    @property
    def above(self) -> Value | None:
        """What autograd knows the value as a view of."""
        return self.near if self.near is not None else self.parent

    @property
    def root(self) -> Value:
        """The value that is the whole region."""
        value = self
        while value.parent is not None:
            value = value.parent
        return value

    @property
    def strided(self) -> bool:
        """Whether `as_strided` is among the views that made the value."""
        value: Value | None = self
        while value is not None:
            if value.near is not None:
                return True
            value = value.parent
        return False


@dataclass
class Regions:
    """All regions by storage, and all values by tensor (kept alive, so that ids stay unique)."""

    by_storage: dict[int, list[Region]] = field(default_factory=dict)
    values: dict[int, tuple[torch.Tensor, Value]] = field(default_factory=dict)

    def key(self, t: torch.Tensor) -> int:
        """The identity of a tensor's storage. Raises NotImplementedError where it has none, but for sparse tensors that were added."""
        if t.layout is torch.sparse_coo and (known := self.get(t)) is not None:
            return known.region.key
        try:
            return t.untyped_storage()._cdata
        except NotImplementedError as error:
            raise NotImplementedError(f"a tensor {beyond_strides(t)}" if beyond_strides(t) else str(error)) from error

    def shares(self, t: torch.Tensor) -> bool:
        """Whether a new tensor lies in a storage that is known already."""
        return t.layout is not torch.sparse_coo and self.key(t) in self.by_storage

    def get(self, t: torch.Tensor) -> Value | None:
        """The value of a tensor object of the program."""
        found = self.values.get(id(t))
        return found[1] if found is not None else None

    def set(self, t: torch.Tensor, value: Value) -> None:
        """Record `t` as `value`."""
        value.born, value.bumps = value.region.version, value.region.bumps
        self.values[id(t)] = (t, value)

    def add(self, t: torch.Tensor, node: fx.Node, inputs: tuple[int, ...] = ()) -> Value:
        """A new region whose whole is the tensor `t`; a sparse one is a region by itself, which nothing views."""
        if t.layout is torch.sparse_coo:
            region, layout = Region(-1 - id(t), _NoStorage()), Layout(t.dtype, tuple(t.shape), (), 0)
        else:
            storage = t.untyped_storage()
            region, layout = Region(storage._cdata, storage, inputs), Layout.of(t)
        self.by_storage.setdefault(region.key, []).append(region)
        value = Value(region, node, layout)
        self.set(t, value)
        return value

    def current(self, value: Value, replay: Callable[[Value], fx.Node]) -> fx.Node:
        """The node that holds the value's present contents; `replay(value)` makes it again from the parent after a
        write elsewhere.
        """
        region = value.region
        if value.version != region.version:
            if value.parent is not None:
                value.node = self.current(value.parent, replay) if value.step is None else replay(value)
            value.version = region.version
        return value.node
