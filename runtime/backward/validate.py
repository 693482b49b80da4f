"""What compiled code takes for granted of the tensors that a forward saved, where callers can change it before the backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dispatch.autograd.joint import written_since
from ..execute.support import is_lazy, laid_out
from ..torch_compat import saved_objects
from .compiled import Described


def as_described(tensors: Sequence[torch.Tensor], known: Sequence[Described]) -> list[torch.Tensor]:
    """What `saved_tensors_hooks` gave back for tensors that were `described`, as compiled code reads it: in that dtype and with those strides
    (offloading may lose the strides, compression the dtype). Raises RuntimeError for another device or other sizes.
    """
    found = []
    for t, (device, dtype, shape, stride) in zip(tensors, known, strict=True):
        if t.device != device or t.shape != shape:
            raise RuntimeError(
                f"the unpack function of saved_tensors_hooks returned a tensor of sizes {list(t.shape)} on {t.device} "
                f"for one of sizes {list(shape)} on {device}"
            )
        plain = t.dtype == dtype and t.stride() == stride and not is_lazy(t)
        found.append(t if plain else laid_out(t, dtype, stride))
    return found


def as_kept(ctx: Any, given: int) -> list[torch.Tensor]:
    """What `save_for_backward` keeps, as objects, for a call with the tangents `given` (bits): `ctx.versions` has the version that each had and
    the tangents that need it. Raises RuntimeError, as eager does, where one was written to since and is needed, and where autograd has freed them.
    """
    tensors = saved_objects(ctx)
    for t, (version, needed) in zip(tensors, ctx.versions, strict=True):
        if needed & given and t._version != version:
            raise written_since(t, version)
    return tensors


def as_given(arguments: list[torch.Tensor], given: Sequence[tuple[int, Described]]) -> None:
    """Saved inputs as the compiled backward reads them, where `x.data = y` has given one another layout since the forward. `given` has the
    positions in `arguments` and what was described. Raises RuntimeError for another dtype, device or other sizes.
    """
    for k, known in given:
        t = arguments[k]
        device, dtype, shape, stride = known
        if t.dtype is not dtype or t.shape != shape or t.device != device:
            raise RuntimeError(
                f"an input of a compiled graph had sizes {list(shape)} and {dtype} on {device} in the forward; before the backward its data "
                f"was replaced by one of sizes {list(t.shape)} and {t.dtype} on {t.device}; run this part without torch.compile"
            )
        moved = t.stride() != stride and any(
            n > 1 and a != b for n, a, b in zip(shape, t.stride(), stride, strict=True)
        )
        if moved or is_lazy(t):
            arguments[k] = laid_out(t, dtype, stride)
