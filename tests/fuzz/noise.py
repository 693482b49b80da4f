"""How far a program's results move when eager's kernels round otherwise: what an error may be, where one run had luck."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Numbers on this grid are taken as exact: kernels that add and multiply them agree to the bit.
_GRID = 4096.0


class Noise(TorchDispatchMode):
    """Moves every rounded floating result of an eager kernel by at most one unit in the last place, up or down, at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.name.partition("::")[2] in _MOVES:
            return out
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel()]
        if any(_rounded(t) for t in [*results, *tree_leaves([args, kwargs])]):
            for t in results:
                self._move(t)
        return out

    def _move(self, t: torch.Tensor) -> None:
        steps = torch.randint(-1, 2, t.shape, generator=self.generator)
        moved = (
            t.double() * (1 + torch.finfo(t.dtype).eps * steps)
            if t.dtype != torch.float64
            else t * (1 + _EPS64 * steps)
        )
        t.copy_(moved)


_EPS64 = torch.finfo(torch.float64).eps
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
