"""Writing operators whose result depends on the order in which eager goes through the elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch

from ....errors import UnsupportedError
from ...torch_compat import known, size_hint
from ..operators.schema import OpInfo, is_elementwise, tensors_of
from ..storage.overlap import may_overlap
from ..storage.regions import Value, same_strides


def check_order(
    info: OpInfo, args: Any, kwargs: Any, value_of: Callable[[torch.Tensor], Value], where: Callable[[], str]
) -> None:
    """Raises `UnsupportedError` when an element is written that the operator reads as another one, or writes twice: eager refuses it, or
    what comes out depends on the order. What goes element by element may read what it writes; of lists, at the same place of both.
    """
    passed = [info.argument(p, args, kwargs) for p in range(len(info.arg_names))]
    places = [(p, k, t) for p, a in enumerate(passed) for k, t in enumerate(tensors_of(a))]
    written = [place for place in places if place[0] in info.written]
    read = [place for place in places if place[0] not in info.written]
    for n, (p, k, t) in enumerate(written):
        value = value_of(t)
        for q, j, other in (*written[:n], *read):
            near = value_of(other)
            if near.region.key != value.region.key or not may_overlap(near.layout, value.layout):
                continue
            if isinstance(passed[p], torch.Tensor):
                elementwise = len(written) == 1 and is_elementwise(info)
            else:
                elementwise = isinstance(passed[q], (list, tuple)) and j == k
            if q in info.written or not elementwise or near.layout.key() != value.layout.key():
                raise UnsupportedError(f"{info.op} writes elements that it also reads, or writes twice{where()}")


def memory_order(info: OpInfo, args: Sequence[Any], result: Any) -> list[int] | None:
    """The dimensions of the tensor that a random operator of eager's writes, in the order in which they lie in memory: so eager draws. None where
    the functional overload, whose result this is, draws in the same order. Raises `UnsupportedError` where symbolic sizes leave the order open.
    """
    if torch.Tag.nondeterministic_seeded not in info.op.tags or info.written != (0,) or not args:
        return None
    tensors = [t for a in args for t in tensors_of(a)]
    if len(tensors) > 1 or tensors[0] is not args[0] or not isinstance(result, torch.Tensor):
        return None
    if same_strides(result, args[0]):
        return None
    stride = args[0].stride()
    order = sorted(range(len(stride)), key=lambda k: size_hint(stride[k], 0), reverse=True)
    if not all(known(stride[a] >= stride[b]) for a, b in pairwise(order)):
        raise UnsupportedError(f"{info.op} draws in an order that its sizes do not tell")
    return order if order != list(range(len(stride))) else None


def write_permuted(
    recording: AbstractContextManager[Any],
    info: OpInfo,
    order: list[int],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Records that the operator writes through a view with its dimensions in that order; returns what it has written."""
    written: torch.Tensor = args[0]
    with recording:
        info.op(written.permute(*order), *args[1:], **kwargs)
    return written
