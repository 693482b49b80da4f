"""Writing operators whose result depends on the order in which eager goes through the elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import UnsupportedError
from .operators import OpInfo, is_elementwise, tensors_of
from .overlap import may_overlap
from .regions import Value


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
