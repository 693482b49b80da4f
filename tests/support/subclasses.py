"""Tensor subclasses that wrap other tensors, and a comparison of programs over them with eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, return_and_correct_aliasing


class Wrapper(torch.Tensor):
    """What the subclasses here have in common: no conversions of their own, and what is inside as text."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:  # type: ignore[override]
        names, _ = self.__tensor_flatten__()  # type: ignore[attr-defined]
        return f"{type(self).__name__}({', '.join(repr(getattr(self, n)) for n in names)})"


class Two(Wrapper):
    """Two tensors of one layout; every operator runs on both. `scale` is metadata."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor, tag: str = "") -> Two:
        return torch.Tensor._make_wrapper_subclass(
            cls, a.shape, strides=a.stride(), storage_offset=a.storage_offset(), dtype=a.dtype, device=a.device
        )

    def __init__(self, a: torch.Tensor, b: torch.Tensor, tag: str = "") -> None:
        self.a, self.b, self.tag = a, b, tag

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["a", "b"], self.tag

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: str, size: Any, stride: Any) -> Two:
        assert inner["a"].shape == torch.Size(size)
        return Two(inner["a"], inner["b"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        a, b = (func(*_part(args, n), **_part(kwargs, n)) for n in ("a", "b"))
        tag = next((t.tag for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Two)), "")
        return return_and_correct_aliasing(
            func, args, kwargs, pytree.tree_map(lambda x, y: Two(x, y, tag) if isinstance(x, torch.Tensor) else x, a, b)
        )


def _part(tree: Any, name: str) -> Any:
    return pytree.tree_map_only(Two, lambda t: getattr(t, name), tree)


class Coercing(Two):
    """A `Two` that converts gradients to what a backward expects, and can be made a plain tensor or another tag."""

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: str, size: Any, stride: Any) -> Coercing:
        return Coercing(inner["a"], inner["b"], context)

    def __coerce_same_metadata_as_tangent__(self, context: Any, expected: Any = None) -> Any:
        if expected is torch.Tensor:
            return self.a + self.b
        return (expected or type(self))(self.a, self.b, context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        a, b = (func(*_part(args, n), **_part(kwargs, n)) for n in ("a", "b"))
        tag = next((t.tag for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Two)), "")
        out = pytree.tree_map(lambda x, y: Coercing(x, y, tag) if isinstance(x, torch.Tensor) else x, a, b)
        return return_and_correct_aliasing(func, args, kwargs, out)


class Scaled(Wrapper):
    """Int8 numbers and one float scale, as quantized weights are; operators run on what they stand for and give plain tensors."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=scale.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["data_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.t.default):
            (x,) = args
            return return_and_correct_aliasing(
                func, args, kwargs, Scaled(func(x.data_), func(x.scale) if x.scale.ndim else x.scale)
            )
        if func is torch.ops.aten.mul_.Scalar or (
            func is torch.ops.aten.mul_.Tensor and not isinstance(args[1], Scaled)
        ):
            args[0].scale.mul_(args[1])
            return args[0]
        args, kwargs = pytree.tree_map_only(Scaled, lambda x: x.data_ * x.scale, (args, kwargs))
        return func(*args, **kwargs)


class Logged(Wrapper):
    """One tensor; notes the operators that run on it."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Logged:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Logged:
        return Logged(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cls.seen.append(str(func))
        inner_args, inner_kwargs = pytree.tree_map_only(Logged, lambda t: t.inner, (args, kwargs))
        out = pytree.tree_map_only(torch.Tensor, Logged, func(*inner_args, **inner_kwargs))
        return return_and_correct_aliasing(func, args, kwargs, out)


def inside(t: Any) -> list[torch.Tensor]:
    """The dense tensors that a tensor is made of."""
    if not is_traceable_wrapper_subclass(t):
        return [t]
    names, _ = t.__tensor_flatten__()
    return [dense for n in names for dense in inside(getattr(t, n))]


def equal(expected: Any, actual: Any) -> None:
    """Leaf for leaf: type, metadata, layout, requires_grad, leafhood, values within rounding, which share storage, which are views of which."""
    a, b = pytree.tree_leaves(expected), pytree.tree_leaves(actual)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert type(x) is type(y), (type(x), type(y))
        if not isinstance(x, torch.Tensor):
            assert x == y
            continue
        assert (x.shape, x.dtype, x.stride(), x.requires_grad) == (y.shape, y.dtype, y.stride(), y.requires_grad)
        assert x.is_leaf == y.is_leaf
        if is_traceable_wrapper_subclass(x):
            assert x.__tensor_flatten__() == y.__tensor_flatten__()
        for p, q in zip(inside(x), inside(y), strict=True):
            assert (p.shape, p.dtype, p.stride()) == (q.shape, q.dtype, q.stride())
            torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-6)
    assert _related(a) == _related(b)


def _related(leaves: list[Any]) -> list[Any]:
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    dense = [p for t in tensors for p in inside(t)]
    shared = [p.untyped_storage()._cdata == q.untyped_storage()._cdata for i, p in enumerate(dense) for q in dense[:i]]
    objects = [(p is q, p._base is q, p is q._base) for i, p in enumerate(tensors) for q in tensors[:i]]
    return [shared, objects]


def compare(
    program: Callable[..., Any],
    compiled: Callable[..., Any],
    make: Callable[[], list[Any]],
    after: Callable[..., Any] | None = None,
) -> None:
    """Run both, and backward from all results that autograd follows; compare results, inputs, moved version counters and gradients. `after` runs on
    the inputs and the flat result before the backward.
    """
    seen = []
    for run in (program, compiled):
        torch.manual_seed(0)
        inputs = make()
        tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)]
        versions = [None if t.is_inference() else t._version for t in tensors]
        torch.manual_seed(1)
        result = run(*inputs)
        flat = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        if after is not None:
            after(inputs, flat)
        followed = [t for t in flat if t.requires_grad]
        if followed:
            torch.autograd.backward(followed, [torch.ones_like(t) for t in followed])
        moved = [v is not None and t._version != v for t, v in zip(tensors, versions, strict=True)]
        gradients = [t.grad if t.is_leaf else None for t in tensors]
        seen.append(([inputs, result], gradients, moved))
    equal(seen[0][0], seen[1][0])
    equal(seen[0][1], seen[1][1])
    assert seen[0][2] == seen[1][2], "version counters of the inputs"
