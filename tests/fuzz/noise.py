"""How far a program's results move when eager's kernels round otherwise: what an error may be, where one run had luck."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Numbers on this grid are taken as exact: kernels that add and multiply them agree to the bit.
_GRID = 4096.0


class Noise(TorchDispatchMode):
    """Moves every rounded floating result of an eager kernel by at most one unit in the last place, up or down, at random. A kernel that
    adds is also given operands moved so: it may round otherwise by as much as its addends are large, not its total.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if func.is_view or name in _MOVES:
            return func(*args, **kwargs)
        given = [t for t in tree_leaves([args, kwargs]) if isinstance(t, torch.Tensor)]
        if _adds(func, name) and not func._schema.is_mutable:
            moved = {id(t): self._moved(t) for t in given if t.is_floating_point() and t.numel()}
            out = func(*args, **kwargs)
            if any(map(_rounded, [*_floating(out), *given])):
                args, kwargs = tree_map(lambda a: moved.get(id(a), a), (args, kwargs))
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if any(map(_rounded, [*_floating(out), *given])):
            for t in _floating(out):
                t.copy_(self._moved(t))
        return out

    def _moved(self, t: torch.Tensor) -> torch.Tensor:
        steps = torch.randint(-1, 2, t.shape, generator=self.generator).double()
        wide = t.detach().double()
        return (wide * (1 + torch.finfo(t.dtype).eps * steps)).to(t.dtype)


def _adds(func: Any, name: str) -> bool:
    if torch.Tag.pointwise not in func.tags or name in _TERMS:
        return True
    return any(a.name == "reduction" for a in func._schema.arguments)  # a loss


def _floating(out: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel()]


# Pointwise operators that add products: with one rounding or with two, as large as the terms.
_TERMS = frozenset(["addcmul", "addcdiv", "lerp"])
# Operators that only bring values from one place to another.
_MOVES = frozenset(
    [
        "clone",
        "copy_",
        "detach",
        "_to_copy",
        "cat",
        "stack",
        "index",
        "index_select",
        "gather",
        "scatter",
        "slice_scatter",
        "select_scatter",
        "where",
        "fill",
        "fill_",
        "zero_",
        "zeros_like",
        "ones_like",
        "full_like",
        "neg",
        "abs",
        "relu",
        "masked_fill",
        "masked_fill_",
        "flip",
        "roll",
        "repeat",
        "index_put_",
        "index_fill",
        "constant_pad_nd",
        "tril",
        "triu",
        "max",
        "min",
        "amax",
        "amin",
        "sort",
        "maximum",
        "minimum",
        "clamp",
        "sign",
        "floor",
        "ceil",
        "round",
        "trunc",
        "new_zeros",
        "zeros",
        "full",
        "arange",
        "scalar_tensor",
    ]
)


def _rounded(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return False
    scaled = value.detach().double() * _GRID
    return bool((scaled != scaled.round()).any())
