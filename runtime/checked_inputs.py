"""Checks of inputs for graphs that are called without guards: code compiled for one size would read stray memory in another."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError
from .dispatch.storage.regions import beyond_strides
from .realize import EagerProgram
from .torch_compat import ShapeEnv, is_traceable_wrapper_subclass, is_zerotensor, pytree


def only_for(examples: Sequence[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a call for positional arguments like `examples` (their sizes that are symbols may be any): it raises `InputError` for others,
    before anything is computed. Ask before the examples are traced: torch's Python kernels for symbolic sizes may resize them.
    """
    leaves, spec = pytree.tree_flatten(tuple(examples))
    flat = len(leaves) == len(examples)
    expected = [_look(x) for x in leaves]
    sizes = _Sizes.of(leaves)

    def check(args: Sequence[Any]) -> None:
        given: Sequence[Any] = args
        if not flat:
            given, found = pytree.tree_flatten(args)
            if found != spec:
                raise InputError(f"the graph was compiled for inputs of the structure {spec}, and called with {found}")
        if len(given) != len(expected):
            raise InputError(f"the graph takes {len(expected)} inputs, {len(given)} were given")
        for k, (x, look) in enumerate(zip(given, expected, strict=True)):
            if look is not None and (wrong := look(x)):
                raise InputError(
                    f"input {k} {wrong}; compile the graph again for such inputs, or through torch.compile, which does that by itself"
                )
        if sizes is not None and (wrong := sizes.look(given)):
            raise InputError(f"{wrong}; compile the graph again for such inputs, or through torch.compile")

    def checked(call: Callable[..., Any]) -> Callable[..., Any]:
        if sizes is not None:
            sizes.any = isinstance(call, EagerProgram)

        def run(*args: Any) -> Any:
            check(args)
            return call(*args)

        return run

    return checked


class _Sizes:
    """What a graph of symbolic sizes takes for granted of its inputs: that equal symbols are equal, and what tracing has asked of them."""

    def __init__(self, places: list[tuple[int, int, Any]], env: ShapeEnv) -> None:
        self.places, self.env = places, env
        self.fine: set[tuple[int, ...]] = set()
        self.any = False  # eager's kernels take what they get

    @classmethod
    def of(cls, examples: Sequence[Any]) -> _Sizes | None:
        """None where no size is a symbol."""
        places, env = [], None
        for k, example in enumerate(examples):
            for d, n in enumerate(_numbers(example)):
                if isinstance(n, torch.SymInt):
                    env = env or n.node.shape_env
                    places.append((k, d, n.node.expr))
        return None if env is None else cls(places, env)

    def look(self, given: Sequence[Any]) -> str:
        """What is wrong with the sizes of these arguments, as text; empty where nothing is. Asked once for each set of sizes."""
        values = tuple([_numbers(given[k])[d] for k, d, _ in self.places])
        if self.any or values in self.fine:
            return ""
        known: dict[Any, int] = {}
        for (k, d, e), value in zip(self.places, values, strict=True):
            if e.is_Symbol and known.setdefault(e, value) != value and not _says_nothing(given[k], d):
                return f"{_named(given[k], k, d)} is {value}, where other sizes make it {known[e]}"
        for (k, d, e), value in zip(self.places, values, strict=True):
            if e.free_symbols <= known.keys() and e.xreplace(known) != value and not _says_nothing(given[k], d):
                return f"{_named(given[k], k, d)} is {value}, where other sizes make it {e.xreplace(known)}"
        if broken := _broken_assumption(self.env, known):
            sizes = [list(x.shape) for x in given if isinstance(x, torch.Tensor)]
            return f"the sizes {sizes} do not meet {self.told(broken, given)}, for which the graph was compiled"
        self.fine.add(values)
        return ""

    def told(self, condition: str, given: Sequence[Any]) -> str:
        """A condition with the names of what its symbols are."""
        names: dict[str, str] = {}
        for k, d, e in self.places:
            if e.is_Symbol:
                names.setdefault(e.name, _named(given[k], k, d))
        return re.sub(r"\b[su]\d+\b", lambda m: names.get(m[0], m[0]), condition)


def _broken_assumption(env: Any, known: Mapping[Any, int]) -> str:
    """A condition on symbols of a ShapeEnv that tracing has relied on and that these values do not meet, as text; empty where there is none."""
    for symbol, value in known.items():
        low = env.var_to_range[symbol].lower if symbol in env.var_to_range else 0
        if value < low:
            return f"{symbol} >= {low}"
        if (
            symbol in env.replacements
            and (other := env.replacements[symbol]).free_symbols <= known.keys()
            and other.xreplace(known) != value
        ):
            return f"{symbol} == {other}"
    for guard in env.guards:
        if guard.expr.free_symbols <= known.keys() and not guard.expr.xreplace(known):
            return str(guard.expr)
    return ""


def _numbers(x: Any) -> tuple[Any, ...]:
    """Sizes and strides of a tensor, or the number itself."""
    if isinstance(x, torch.Tensor):
        return () if is_traceable_wrapper_subclass(x) or beyond_strides(x) else (*x.shape, *x.stride())
    return (x,) if isinstance(x, (int, torch.SymInt)) else ()


def _says_nothing(x: Any, d: int) -> bool:
    """Whether number `d` of a tensor is a stride that nobody looks at."""
    return isinstance(x, torch.Tensor) and d >= x.dim() and (x.numel() == 0 or x.shape[d - x.dim()] <= 1)


def _named(x: Any, k: int, d: int) -> str:
    if not isinstance(x, torch.Tensor):
        return f"input{k}"
    return f"input{k}.shape[{d}]" if d < x.dim() else f"input{k}.stride({d - x.dim()})"


def _look(example: Any) -> Callable[[Any], str] | None:
    """What is wrong with an argument in the place of `example`, as text; empty where nothing is."""
    if isinstance(example, torch.Tensor):
        if is_traceable_wrapper_subclass(example):
            return _look_at_type(example)
        beyond = beyond_strides(example)
        return _look_at_kind(beyond, example.dtype) if beyond else _look_at_layout(example)
    if type(example) in (int, bool, str):
        return lambda x: "" if x == example else f"is {x!r}, and {example!r} is part of the compiled graph"
    return None


def _look_at_type(example: torch.Tensor) -> Callable[[Any], str]:
    kind = type(example)
    return lambda x: (
        "" if isinstance(x, kind) else f"is a {type(x).__name__}, the graph was compiled for a {kind.__name__}"
    )


def _look_at_kind(beyond: str, dtype: torch.dtype) -> Callable[[Any], str]:
    """A graph for such a tensor is run eagerly, whatever its sizes: what matters is that eager's kernels are those of the same kind."""

    def look(x: Any) -> str:
        if not isinstance(x, torch.Tensor):
            return f"is a {type(x).__name__}, the graph was compiled for a tensor"
        if x.dtype is not dtype:
            return f"is {x.dtype}, the graph was compiled for {dtype}"
        found = beyond_strides(x)
        return (
            "" if found == beyond else f"{found or 'is a strided tensor'}, the graph was compiled for one that {beyond}"
        )

    return look


def _look_at_layout(example: torch.Tensor) -> Callable[[Any], str]:
    dtype, device, sizes, strides = example.dtype, example.device, tuple(example.shape), tuple(example.stride())
    known = all(type(n) is int for n in (*sizes, *strides))
    lazy, followed = (example.is_neg(), example.is_conj(), is_zerotensor(example)), example.requires_grad

    def look(x: Any) -> str:
        if not isinstance(x, torch.Tensor):
            return f"is a {type(x).__name__}, the graph was compiled for a tensor"
        if beyond := beyond_strides(x):
            return f"{beyond}, the graph was compiled for a strided tensor"
        if (x.is_neg(), x.is_conj(), is_zerotensor(x)) != lazy:
            return "is lazily negated, conjugated or zero, or the graph was compiled for such a tensor: resolve_neg(), resolve_conj(), clone()"
        if x.requires_grad and not followed and torch.is_grad_enabled():
            return "requires grad, the graph was compiled for a tensor that does not"
        if x.dtype is not dtype:
            return f"is {x.dtype}, the graph was compiled for {dtype}"
        if x.device != device:
            return f"is on {x.device}, the graph was compiled for {device}"
        if known and x.shape == sizes and x.stride() == strides:
            return ""
        if x.dim() != len(sizes) or any(type(n) is int and n != m for n, m in zip(sizes, x.shape, strict=True)):
            return f"has the sizes {list(x.shape)}, the graph was compiled for {list(sizes)}"
        # A stride says nothing along a dimension of one element, nor in a tensor without elements.
        moved = (n > 1 and type(s) is int and s != t for n, s, t in zip(x.shape, strides, x.stride(), strict=True))
        if x.numel() and any(moved):
            return f"has the strides {list(x.stride())}, the graph was compiled for {list(strides)}"
        return ""

    return look
