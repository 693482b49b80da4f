"""Which products of matrices gain by a kernel that also computes what is beside them: with `max_autotune` each such kernel, with several blocks, is
timed against the library's product and the kernels around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...generated.tuning import Block, FusedProduct
from ..ir.nodes import ITEMSIZE
from ..kernels.operands import Layouts, count
from ..kernels.plan import Allocation, ExternStep, Kernel, KernelStep, Plan, Step, Tile
from ..kernels.steps import nbytes, step_reads, step_writes
from ..machine import tuning_of
from ..render.triton_unit import render_triton
from ..tile.fused import described_operands, fused_kernel
from ..tile.launch import launch
from .autotune import Autotuner, Memory, Task, Times, Trial

MOST = 2  # times the points of a loop that a block may have


def tile_of(block: Block | FusedProduct, descriptors: bool = False) -> Tile:
    """A block of a table, as a plan has it."""
    return Tile(block.block_m, block.block_n, block.block_k, block.num_warps, block.num_stages, descriptors=descriptors)


def tiles_of(kernel: Kernel, layouts: Layouts, capability: int) -> list[Tile]:
    """Those of the table of a GPU (by compute capability, times ten) that are not far larger than the product."""
    found, _ = fused_kernel(replace(kernel, tile=Tile(16, 16, 16, 1, 1)), layouts)
    described = any(described_operands(found, layouts, kernel.gpu))
    sizes = [count((v,)) for v in (found.row, found.column, found.depth)]

    def fits(block: Block) -> bool:
        return all(b <= MOST * n for b, n in zip((block.block_m, block.block_n, block.block_k), sizes, strict=True))

    return [
        tile_of(b, b.descriptors) for b in tuning_of(capability).tiles if fits(b) and (described or not b.descriptors)
    ]


@dataclass(frozen=True)
class Measured:
    """`Selector` by measurement. `capability`: of the device that measures, times ten."""

    autotuner: Autotuner
    capability: int

    def __call__(self, kernels: Sequence[Kernel], layouts: Layouts) -> list[tuple[float, Tile] | None]:
        """What each kernel gains in µs, and with which tile; None where its parts are as fast."""
        tiles = [tiles_of(k, layouts, self.capability) for k in kernels]
        tasks = [task_of(k, t, layouts, self.capability) for k, t in zip(kernels, tiles, strict=True)]
        times = iter(self.autotuner.times([t for t in tasks if t is not None], "products.txt"))
        margin = tuning_of(self.capability).margin
        found: list[tuple[float, Tile] | None] = []
        for some, task in zip(tiles, tasks, strict=True):
            measured = next(times) if task is not None else None
            found.append(None if measured is None else _fastest(some, measured, margin))
        return found


def task_of(kernel: Kernel, tiles: Sequence[Tile], layouts: Layouts, capability: int) -> Task | None:
    """What is to be timed: the kernel with each of its tiles against its parts; None where no tile fits, or a size is a symbol."""
    steps: list[Step] = [*kernel.parts]
    names = dict.fromkeys(n for s in steps for n in (*step_reads(s), *step_writes(s)))
    memory: dict[str, Memory] = {}
    for name in names:
        b = layouts[name]
        size = nbytes(b)
        if size is None or not isinstance(b.offset, int):
            return None
        memory[name] = Memory(b.dtype, size // ITEMSIZE[b.dtype] + b.offset)
    trials = tuple(_trial(replace(kernel, tile=tile), layouts, memory, capability) for tile in tiles)
    parts = tuple(
        part if isinstance(part, ExternStep) else _trial(part.kernel, layouts, memory, capability)
        for part in kernel.parts
    )
    return Task(trials, parts, layouts) if trials else None


def _trial(kernel: Kernel, layouts: Layouts, memory: dict[str, Memory], capability: int) -> Trial:
    places = {n: Allocation("dedicated") for n in (*kernel.reads, *kernel.writes)}
    unit = render_triton(Plan((), [KernelStep(kernel)], (), dict(layouts), places), capability=capability)
    (one,) = unit.kernels.values()
    return Trial((one,), (*kernel.reads, *kernel.writes), memory, launch(kernel, layouts))


def _fastest(tiles: Sequence[Tile], times: Times, margin: int) -> tuple[float, Tile] | None:
    """What is gained by the fastest tile, and that, where it takes so many percent less than the parts."""
    number, best = min(times.us.items(), key=lambda one: one[1])
    assert times.instead_of is not None
    return (times.instead_of - best, tiles[number]) if best * 100 <= times.instead_of * (100 - margin) else None


__all__ = ["Measured", "task_of", "tile_of", "tiles_of"]
