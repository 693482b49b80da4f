"""How far a program's results move when eager's kernels round otherwise: what an error may be, where one run had luck."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..runtime.torch_compat import running_node

NOISY_RUNS, MANY_RUNS = 4, 16
"""In some few runs a single sum may have luck every time."""
# Numbers on this grid are taken as exact: kernels that add and multiply them agree to the bit.
_GRID = 4096.0
# In short dtypes every number may be on it: those with no more significant bits than this count as exact (inputs have five).
_BITS = {torch.bfloat16: 5, torch.float16: 8}


class Noise(TorchDispatchMode):
    """Moves every rounded floating result of an eager kernel by at most one unit in the last place, up or down, at random. A kernel that
    adds is also given operands moved so: it may round otherwise by as much as its addends are large, not its total. So it is with the
    gradients of one tensor, which autograd adds one by one: the order is its own, and a compiled graph gives the sum of those inside of it.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self._addends: dict[
            int, tuple[Any, torch.Tensor]
        ] = {}  # storage → what keeps it, the largest addend of each element's sum

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if func.is_view or name in _MOVES:
            return func(*args, **kwargs)
        given = [t for t in tree_leaves([args, kwargs]) if isinstance(t, torch.Tensor)]
        if name in ("add", "add_") and len(given) == 2 and running_node() is not None:
            return self._next_gradient(func, given, args, kwargs)
        if _adds(func, name) and not func._schema.is_mutable:
            moved = {id(t): self._moved(t) for t in given if _is_floating(t)}
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

    def _next_gradient(self, func: Any, given: list[torch.Tensor], args: Any, kwargs: Any) -> torch.Tensor:
        sums = [self._addends.get(t.untyped_storage()._cdata, (None, t))[1] for t in given]
        largest = [s.abs() if s.shape == t.shape else t.abs() for s, t in zip(sums, given, strict=True)]
        scale = torch.maximum(*largest) if all(t.is_floating_point() for t in given) else None
        out: torch.Tensor = func(*args, **kwargs)
        if any(map(_rounded, [out, *given])):
            # Also a total without rounding (1.5 - 1.5) would have had one in another order.
            steps = torch.randint(-1, 2, out.shape, generator=self.generator).double().to(out.device)
            apart = 0 if scale is None else torch.finfo(out.dtype).eps * scale.double() * steps
            out.copy_((self._moved(out).double() + apart).to(out.dtype))
        if scale is not None and scale.shape == out.shape:
            self._addends[out.untyped_storage()._cdata] = (out.untyped_storage(), scale)
        return out

    def _moved(self, t: torch.Tensor) -> torch.Tensor:
        steps = torch.randint(-1, 2, t.shape, generator=self.generator).double().to(t.device)
        wide = t.detach().double()
        return (wide * (1 + torch.finfo(t.dtype).eps * steps)).to(t.dtype)


class NoiseOfStatistics(Noise):
    """Also for running statistics, which a batch norm writes though its schema does not say so: the call that is given moved operands would
    write copies of them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [a.name for a in func._schema.arguments]
        if not any(name.startswith("running_") for name in names):
            return super().__torch_dispatch__(func, types, args, kwargs)
        moved = [
            self._moved(a) if _is_floating(a) and not name.startswith("running_") else a
            for name, a in zip(names, args, strict=False)
        ]
        return func(*moved, **(kwargs or {}))


def _adds(func: Any, name: str) -> bool:
    if torch.Tag.pointwise not in func.tags or name in _TERMS:
        return True
    return any(a.name == "reduction" for a in func._schema.arguments)  # a loss


def _floating(out: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(out) if _is_floating(t)]


def _is_floating(value: Any) -> bool:
    """Whether it has floating elements to look at: zeros without memory have none, nor has what torch adds up for their sizes."""
    if not isinstance(value, torch.Tensor) or value.device.type == "meta" or torch._is_zerotensor(value):
        return False
    return value.is_floating_point() and value.numel() > 0


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
    if not _is_floating(value):
        return False
    if value.dtype in _BITS:
        scaled = torch.frexp(value.detach().double())[0] * 2 ** _BITS[value.dtype]
    else:
        scaled = value.detach().double() * _GRID
    return bool((scaled != scaled.round()).any())
