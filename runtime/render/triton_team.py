"""Few long rows: several programs go through one row together.

Each holds a piece of the row in registers. Where the row is reduced, each stores what its own piece gives, waits until all have done so, and
reduces what all have stored, in one order: so every program has the same result to the bit, and so has every launch.

The driver is told to begin the kernel only where there is room for all programs (a cooperative launch). They meet by a counter in the device's
memory, which only grows until the last of them leaves and sets it back to 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.index import product
from ..kernels.plan import Kernel
from ..tile.launch import Launch
from .triton_values import TYPES, steps

SLOT, SPACE = 8, "i64"  # bytes in which a program tells of one reduction, and what is behind the pointer to them
TEAM_CALL = "tp.team_meets("  # in a kernel of a team
ARGUMENTS = "counter", "space"  # behind the buffers


class Team:
    """How the programs of a team go through a row, in the text of their kernel.

    row   which row a program has; `once` what a mask asks beside, where one program of a team is to store.
    rows  of all teams.
    """

    def __init__(self, kernel: Kernel, shape: Launch) -> None:
        self.size, self.steps, self.rows = kernel.team, shape.inner, product(v.extent for v in kernel.outer)
        self.row, self._member = f"(tl.program_id(0) // {self.size})", f"tl.program_id(0) % {self.size}"
        self.once = f" & ({self._member} == 0)"
        self.meetings = self.told = 0

    def piece(self, group: int, count: str, wide: bool) -> list[str]:
        """The steps of one program, of so many."""
        assert isinstance(self.steps, int)
        lines = [f"rindex{group} = {steps(wide, f'{self._member} * {self.steps}')}"]
        some = [f"({steps(False)} < {self.steps})"] if self.steps & (self.steps - 1) else []
        some += [f"(rindex{group} < {count})"] if self.size * self.steps != int(count) else []
        return [*lines, f"rmask{group} = {' & '.join(some) or 'tl.full([1, RBLOCK], True, tl.int1)'}"]

    def own(self, name: str) -> str:
        """What the piece gives, where `name` is what the row gives."""
        return f"{name}_own"

    def meets(self, lines: list[str], ended: Sequence[tuple[str, str, str]]) -> list[str]:
        """What each program of a team found for reductions (their name, identity and dtype), once all have told it: blocks of one dimension."""
        first, self.told = self.told, self.told + len(ended)
        self.meetings += 1
        lines += [f"tp.team_tells(space, {first + k}, {self.own(name)})" for k, (name, _, _) in enumerate(ended)]
        lines.append(f"{TEAM_CALL}counter, {self.meetings})")
        size = 1 << (self.size - 1).bit_length()
        return [
            f"tp.team_told(space, {first + k}, {self.size}, {size}, {identity}, {TYPES[dtype]})"
            for k, (_, identity, dtype) in enumerate(ended)
        ]

    def leaves(self) -> str:
        return f"tp.team_leaves(counter, {self.meetings})"


__all__ = ["ARGUMENTS", "SLOT", "SPACE", "TEAM_CALL", "Team"]
