"""Tensor subclasses that wrap other tensors (`__tensor_flatten__`), as the dense tensors inside of them and back again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....errors import UnsupportedError
from ....generated.wrapper_steps import STEPS
from ...ir.quote import attribute, identifier
from ...torch_compat import is_traceable_wrapper_subclass as is_wrapper
from ...torch_compat import python_source, pytree


@dataclass(frozen=True, eq=False)
class Held:
    """Something inside of a wrapper that is no tensor (a device mesh): it is the same at every call."""

    value: Any


@dataclass(frozen=True, eq=False)
class Wrapped:
    """How a wrapper is put together.

    cls, context  its type, and what `__tensor_flatten__` tells besides the names of the inner tensors.
    inner    name of each inner tensor, with how that one is put together when it is a wrapper itself; other things inside as they are.
    size, stride  of the wrapper, integers or size symbols.
    """

    cls: Any
    context: Any
    inner: tuple[tuple[str, Wrapped | Held | None], ...]
    size: tuple[Any, ...]
    stride: tuple[Any, ...]

    @classmethod
    def of(cls, t: Any) -> Wrapped:
        """How the wrapper `t` is put together. Raises `UnsupportedError` for metadata with size symbols."""
        names, context = t.__tensor_flatten__()
        for part in pytree.tree_leaves(context):
            if isinstance(part, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise UnsupportedError(f"a {type(t).__name__} has dynamic sizes in its metadata; mark them static")
        inner: list[tuple[str, Wrapped | Held | None]] = []
        for name in names:
            held = getattr(t, name)
            if isinstance(held, torch.Tensor):
                inner.append((name, cls.of(held) if is_wrapper(held) else None))
            else:
                inner.append((name, Held(held)))
        return cls(type(t), context, tuple(inner), tuple(t.shape), tuple(t.stride()))

    def symbols(self) -> set[Any]:
        """Size symbols in its sizes and strides, and in those of wrappers inside."""
        found = {s for n in (*self.size, *self.stride) if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}
        return found.union(*(w.symbols() for _, w in self.inner if isinstance(w, Wrapped)))

    @property
    def count(self) -> int:
        """Dense tensors inside."""
        return sum(1 if w is None else w.count for _, w in self.inner if not isinstance(w, Held))

    def take(self, t: Any) -> list[torch.Tensor]:
        """The dense tensors inside of `t`, which is put together in this way."""
        found: list[torch.Tensor] = []
        for name, w in self.inner:
            if not isinstance(w, Held):
                found += [getattr(t, name)] if w is None else w.take(getattr(t, name))
        return found

    def put(self, dense: Iterator[torch.Tensor]) -> torch.Tensor:
        """A wrapper of the next `count` tensors."""
        held = {
            name: w.value if isinstance(w, Held) else next(dense) if w is None else w.put(dense)
            for name, w in self.inner
        }
        made: torch.Tensor = self.cls.__tensor_unflatten__(held, self.context, self.size, self.stride)
        return made

    def paths(self, path: str) -> list[str]:
        """Source text of each dense tensor inside of the wrapper `path`."""
        found: list[str] = []
        for name, w in self.inner:
            if not isinstance(w, Held):
                found += [attribute(path, name)] if w is None else w.paths(attribute(path, name))
        return found

    def fits(self, t: Any) -> bool:
        """Whether `t` is put together in this way."""
        if type(t) is not self.cls:
            return False
        names, context = t.__tensor_flatten__()
        return (
            list(names) == [name for name, _ in self.inner]
            and bool(context == self.context)
            and all(_fits(w, getattr(t, name)) for name, w in self.inner)
        )


def _fits(w: Wrapped | Held | None, held: Any) -> bool:
    if isinstance(w, Held):
        return bool(w.value == held)
    return w.fits(held) if w is not None else not is_wrapper(held)


def inner_tensors(t: Any) -> list[torch.Tensor]:
    """The dense tensors that `t` is made of: `t` itself when it is no wrapper."""
    return Wrapped.of(t).take(t) if is_wrapper(t) else [t]


def _global_stem(text: str) -> str:
    """What a name of generated source begins with; not as those of its local variables, which are a letter with a number."""
    stem = identifier(text)
    return f"_{stem}_" if re.fullmatch(r"[A-Za-z]?\d*|\d.*", stem) else stem


class Names:
    """Types and metadata that generated source mentions, by the names it has for them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def of(self, value: Any, stem: str) -> str:
        """The name of `value`, or its text where it has one."""
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        for name, known in self.values.items():
            if known is value:
                return name
        name = f"{_global_stem(stem)}{len(self.values)}"
        self.values[name] = value
        return name

    def wrap(self, result: str, w: Wrapped, dense: Iterator[str]) -> list[str]:
        """Lines that make `result`, put together like `w`, of the expressions that `dense` gives next; size symbols go by their names."""
        lines: list[str] = []
        parts = []
        for name, deeper in w.inner:
            if isinstance(deeper, Held):
                parts.append(f"{name!r}: {self.of(deeper.value, name)}")
            elif deeper is None:
                parts.append(f"{name!r}: {next(dense)}")
            else:
                made = f"{result}_{identifier(name)}"
                lines += self.wrap(made, deeper, dense)
                parts.append(f"{name!r}: {made}")
        step = STEPS["wrap_subclass"].code.format(
            result=result,
            type=self.of(w.cls, w.cls.__name__),
            inner="{" + ", ".join(parts) + "}",
            context=self.of(w.context, "context"),
            size=_sizes(w.size),
            stride=_sizes(w.stride),
        )
        return [*lines, step]


def number(n: Any) -> str:
    """A size as source text over size symbols."""
    return python_source(n.node.expr) if isinstance(n, torch.SymInt) else str(n)


def _sizes(values: Sequence[Any]) -> str:
    return f"({', '.join(map(number, values))}{',' if len(values) == 1 else ''})"


def like_tangent(t: Any) -> tuple[Any, Wrapped]:
    """A wrapper like those that gradients of the traced result `t` will be made into, and how it is put together."""
    change = getattr(t, "__coerce_tangent_metadata__", None)
    made = (t if change is None else change()).detach()
    return made, Wrapped.of(made)


def coerced(t: Any, expected: Wrapped, place: str) -> Any:
    """A gradient that arrived for `place`, put together as the one that the backward was traced with. Subclasses convert themselves
    (`__coerce_same_metadata_as_tangent__`), but for strides, which a sum's gradient has of 0. Raises RuntimeError where they do not offer it.
    """
    if not expected.fits(t) and isinstance(t, torch.Tensor) and not t.is_contiguous():
        t = t.contiguous()
    if expected.fits(t):
        return t
    convert = getattr(t, "__coerce_same_metadata_as_tangent__", None)
    if convert is not None:
        kind = () if type(t) is expected.cls else (expected.cls,)
        made = convert(expected.context, *kind)
        if made is not None and expected.fits(made):
            return made
    raise RuntimeError(
        f"the gradient of {place} is a {type(t).__name__}, but its backward was compiled for a {expected.cls.__name__} with the metadata "
        f"{expected.context!r}; pass such a gradient, or give {type(t).__name__} a method __coerce_same_metadata_as_tangent__"
    )


def dense_tangent(t: Any, place: str) -> torch.Tensor:
    """A gradient for a dense result that arrived as a tensor of some subclass, as a plain tensor. Raises RuntimeError where that is none."""
    convert = getattr(t, "__coerce_same_metadata_as_tangent__", None)
    made: Any = convert(None, torch.Tensor) if convert is not None else t
    if type(made) is torch.Tensor or (made is not None and not is_wrapper(made)):
        return made  # type: ignore[no-any-return]
    raise RuntimeError(
        f"the gradient of {place} is a {type(t).__name__}, but its backward was compiled for a plain tensor; pass one, "
        f"or give {type(t).__name__} a method __coerce_same_metadata_as_tangent__"
    )
