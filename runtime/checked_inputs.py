"""Checks of inputs for graphs that are called without guards: code compiled for one size would read stray memory in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import InputError
from .dispatch.regions import beyond_strides
from .torch_compat import is_traceable_wrapper_subclass, is_zerotensor, pytree


def only_for(examples: Sequence[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a call for positional arguments like `examples` (their sizes that are symbols may be any): it raises `InputError` for others,
    before anything is computed. Ask before the examples are traced: torch's Python kernels for symbolic sizes may resize them.
    """
    leaves, spec = pytree.tree_flatten(tuple(examples))
    flat = len(leaves) == len(examples)
    expected = [_look(x) for x in leaves]

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

    def checked(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            check(args)
            return call(*args)

        return run

    return checked


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
