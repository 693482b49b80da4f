"""Kernels as a GPU can run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ...errors import UnsupportedError
from ..fuse.build import TILE
from ..ir.nodes import Buffer
from ..kernels.plan import Kernel
from ..tile.legal import in_registers, refusal

__all__ = ["legal_kernel"]


def legal_kernel(build: Callable[..., Kernel], layouts: Mapping[str, Buffer]) -> Kernel:
    """The kernel of a group, whose tiles that a GPU can neither keep in registers nor compute again are spilled to memory. `build` is `build_kernel`,
    which takes their names. Raises `UnsupportedError` for a kernel that no GPU runs.
    """
    in_memory: frozenset[str] = frozenset()
    while True:
        kernel = build(in_memory=in_memory)
        if why := refusal(kernel, layouts):
            raise UnsupportedError(f"{kernel.name}: {why}")
        made = in_registers(kernel, layouts)
        if not made.spilled:
            return replace(kernel, no_alias=made.no_alias)
        in_memory |= {name.removeprefix(TILE) for name in made.spilled}
