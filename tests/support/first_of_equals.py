"""Eager with sorts that are stable: of equal elements any may come first where a call does not ask for more, and a GPU's kernels of ours take the
first one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_SORTS = (_ATEN.sort.default, _ATEN.sort.stable, _ATEN.sort.values, _ATEN.sort.values_stable)
_SELECTIONS = (_ATEN.topk.default, _ATEN.topk.values)


class FirstOfEquals(TorchDispatchMode):
    """What `sort` and `topk` return while it is entered is that of a stable sort. `changed`: whether any call had others of equals before."""

    changed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in (*_SORTS, *_SELECTIONS):
            return found
        names = [a.name for a in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        x, dim = given["self"], given.get("dim", -1)
        reverse = given.get("largest", True) if func in _SELECTIONS else given.get("descending", False)
        chosen = _ATEN.sort.stable(x, stable=True, dim=dim, descending=reverse)
        for into, first in zip(found, chosen, strict=True):
            taken = first.narrow(dim, 0, given["k"]) if func in _SELECTIONS and x.dim() else first
            self.changed |= not torch.equal(into.nan_to_num(), taken.nan_to_num())
            into.copy_(taken)
        return found


__all__ = ["FirstOfEquals"]
