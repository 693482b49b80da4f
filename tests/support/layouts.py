"""The tensors of a call in other layouts: permuted, with gaps, repeated, with dimensions of size 1 of any stride."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Arguments = tuple[list[Any], dict[str, Any]]


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All strided tensors of nested lists, tuples and the values of dicts."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [t for v in tree for t in tensors_of(v)]
    return [tree] if isinstance(tree, torch.Tensor) and tree.layout is torch.strided else []


def laid_out(
    t: torch.Tensor, order: Sequence[int], gap: int = 1, offset: int = 0, odd: int | None = None
) -> torch.Tensor:
    """A copy of `t` with its dimensions from the slowest to the fastest in `order`, whose neighbours lie `gap` apart, which begins at `offset`;
    dimensions of size 1 have the stride `odd`.
    """
    strides, step = [0] * t.ndim, gap
    for d in reversed(order):
        strides[d] = step
        step *= max(t.shape[d], 1)
    if odd is not None:
        strides = [odd if n == 1 else s for n, s in zip(t.shape, strides, strict=True)]
    found = torch.zeros(step + offset + 64, dtype=t.dtype).as_strided(t.shape, strides, offset)
    return found.copy_(t)


def _rows(t: torch.Tensor) -> list[int]:
    return list(range(t.ndim))


def _repeated(t: torch.Tensor, dim: int) -> torch.Tensor:
    return t.narrow(dim, 0, 1).clone().expand(t.shape) if t.ndim and t.shape[dim] else t


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda t: laid_out(t, _rows(t)),
    "transposed": lambda t: laid_out(t, _rows(t)[:-2] + _rows(t)[-2:][::-1]),
    "reversed": lambda t: laid_out(t, _rows(t)[::-1]),
    "first dimension last": lambda t: laid_out(t, _rows(t)[1:] + _rows(t)[:1]),
    "channels last": lambda t: laid_out(t, [0, *_rows(t)[2:], 1] if t.ndim > 2 else _rows(t)),
    "gaps": lambda t: laid_out(t, _rows(t), 2, 3),
    "reversed with gaps": lambda t: laid_out(t, _rows(t)[::-1], 2, 3),
    "odd strides of size 1": lambda t: laid_out(t, _rows(t), odd=7),
    "strides 0 of size 1": lambda t: laid_out(t, _rows(t), odd=0),
    "first repeated": lambda t: _repeated(t, 0),
    "last repeated": lambda t: _repeated(t, -1),
}


def in_other_layouts(args: list[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Arguments]]:
    """A label, and the arguments with all tensors, or only the first or the second one, in each of `LAYOUTS`; then again with every dimension of
    each size cut to 1, unless there may be positions among the arguments, or they name it in a list. No two are laid out alike.
    """
    seen: set[Any] = set()
    tensors = tensors_of([args, kwargs])
    # Positions would lie outside of dimensions that are cut.
    kinds = {t.dtype.is_floating_point or t.dtype.is_complex for t in tensors}
    said = _numbers((*args, *kwargs.values()))
    sizes = sorted({n for t in tensors for n in t.shape if n > 1} - said) if len(kinds) == 1 else []
    for size in (None, *sizes):
        given = args, kwargs
        if size is not None:
            given = mapped(given, lambda t, _, n=size: _cut(t, n))
        for name, layout in LAYOUTS.items():
            for which in ("all", "first", "second")[: len(tensors) + 1]:
                found = mapped(
                    given,
                    lambda t, k, f=layout, w=which: f(t) if w == "all" or k == ("first", "second").index(w) else t,
                )
                key = tuple((t.shape, t.stride(), t.storage_offset()) for t in tensors_of([*found]))
                if (size, key) not in seen:
                    seen.add((size, key))
                    yield f"{name}, {which}{'' if size is None else f', sizes {size} cut to 1'}", found


def _numbers(tree: Any, inside: bool = False) -> set[int]:
    """The integers in lists among arguments."""
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, (list, tuple)):
        return {n for v in tree for n in _numbers(v, inside or isinstance(v, list))}
    return {tree} if inside and type(tree) is int else set()


def _cut(t: torch.Tensor, size: int) -> torch.Tensor:
    for d, n in enumerate(t.shape):
        if n == size:
            t = t.narrow(d, 0, 1)
    return t.clone()


def mapped(tree: Any, change: Callable[[torch.Tensor, int], torch.Tensor], count: list[int] | None = None) -> Any:
    """`tree` with each strided tensor changed; the function gets its number, too."""
    count = [0] if count is None else count
    if isinstance(tree, dict):
        return {k: mapped(v, change, count) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(mapped(v, change, count) for v in tree)
    if not isinstance(tree, torch.Tensor) or tree.layout is not torch.strided:
        return tree
    count[0] += 1
    return change(tree, count[0] - 1)
