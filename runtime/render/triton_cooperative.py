"""Cooperative reductions: several programs reduce one long row together.

Each holds a split of the row in registers. Where the row is reduced, each publishes the partial result of its split, waits at a grid barrier until
all have done so, and reduces all partial results in one order: so every program has the same result to the bit, and so has every launch.

A cooperative launch makes the driver begin the kernel only where all programs can run at once. The barrier is a semaphore in the device's memory,
which only grows until the last program resets it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.index import product
from ..kernels.plan import Kernel
from ..tile.launch import Launch
from .triton_values import TYPES, steps

PARTIAL_BYTES = 8  # of the workspace, for one partial result of a program
WORKSPACE = "i64"  # the type behind the pointer to it
BARRIER_CALL = "tp.barrier_wait("  # in the text of a cooperative kernel
ARGUMENTS = "semaphore", "workspace"  # behind the buffers


class Cooperative:
    """What the text of a cooperative kernel has in addition to that of a persistent one.

    row         of a program.
    store_once  what is added to a mask where one of the programs of a row is to store.
    rows        of the kernel.
    """

    def __init__(self, kernel: Kernel, shape: Launch) -> None:
        self.splits, self.steps, self.rows = kernel.splits, shape.inner, product(v.extent for v in kernel.outer)
        self.row, self._split = f"(tl.program_id(0) // {self.splits})", f"tl.program_id(0) % {self.splits}"
        self.store_once = f" & ({self._split} == 0)"
        self.barriers = self.published = 0

    def split_index(self, group: int, count: str, int64_index: bool) -> list[str]:
        """The index of a program's steps, of `count`, and its mask."""
        assert isinstance(self.steps, int)
        lines = [f"rindex{group} = {steps(int64_index, f'{self._split} * {self.steps}')}"]
        some = [f"({steps(False)} < {self.steps})"] if self.steps & (self.steps - 1) else []
        some += [f"(rindex{group} < {count})"] if self.splits * self.steps != int(count) else []
        return [*lines, f"rmask{group} = {' & '.join(some) or 'tl.full([1, RBLOCK], True, tl.int1)'}"]

    def partial(self, name: str) -> str:
        """The name of the partial result of the reduction `name`."""
        return f"{name}_partial"

    def gather_partials(self, lines: list[str], reduced: Sequence[tuple[str, str, str]]) -> list[str]:
        """Publishes partial results of reductions (name, identity, dtype) and waits for all programs: adds to `lines`. Returns for each reduction the
        text of the row's partial results, a block of one dimension.
        """
        first, self.published = self.published, self.published + len(reduced)
        self.barriers += 1
        lines += [
            f"tp.publish_partial(workspace, {first + k}, {self.partial(name)})"
            for k, (name, _, _) in enumerate(reduced)
        ]
        lines.append(f"{BARRIER_CALL}semaphore, {self.barriers})")
        size = 1 << (self.splits - 1).bit_length()
        return [
            f"tp.load_partials(workspace, {first + k}, {self.splits}, {size}, {identity}, {TYPES[dtype]})"
            for k, (_, identity, dtype) in enumerate(reduced)
        ]

    def reset_barrier(self) -> str:
        return f"tp.barrier_reset(semaphore, {self.barriers})"


__all__ = ["ARGUMENTS", "BARRIER_CALL", "PARTIAL_BYTES", "WORKSPACE", "Cooperative"]
