"""Kernels as a GPU can run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ...errors import UnsupportedError
from ..fuse.build import TILE
from ..ir.nodes import Buffer
from ..kernels.plan import Kernel
from ..tile.legal import made_for, refused

__all__ = ["legal_kernel"]


def legal_kernel(build: Callable[..., Kernel], layouts: Mapping[str, Buffer]) -> Kernel:
    """The kernel of a group with values in memory that a GPU can neither keep in registers nor compute again. `build` is `build_kernel`, which is
    told of these. Raises `UnsupportedError` for a kernel that no GPU runs.
    """
    in_memory: frozenset[str] = frozenset()
    while True:
        kernel = build(in_memory=in_memory)
        if why := refused(kernel, layouts):
            raise UnsupportedError(f"{kernel.name}: {why}")
        made = made_for(kernel, layouts)
        if not made.lost:
            return replace(kernel, apart=made.apart)
        in_memory |= {name.removeprefix(TILE) for name in made.lost}
