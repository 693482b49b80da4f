"""Horizontal fusion: which kernels of a plan can run as one launch. They are alike, and none writes memory that another one reads or writes."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field

from ..kernels.plan import Kernel, KernelStep, Plan
from ..kernels.statements import kernel_checks
from ..kernels.steps import allocation_root, arena_offset, nbytes, step_reads

OPEN = (
    8  # groups that may grow at a time: a plan whose kernels are all different must not be compared with all of itself
)
REACH = 1024  # kernels that one may be moved over

Key = Callable[[Kernel], tuple[Hashable, int] | None]


def horizontal_groups(plan: Plan, key: Key, *, boxed: bool = False) -> list[tuple[str, ...]]:
    """Groups of two kernels and more, by name, in the order of the plan. A group runs where its first member stood.

    key    of a kernel that may be a member: what all members of its group have in common, and how many there may be; else None.
    boxed  the call frees each argument after its last use.

    Members move only forward, over kernels that share no memory with them and cannot raise. So what they read is still there. Memory is freed
    where it was, and nothing is allocated earlier: memory does not grow.
    """
    freed = [k in plan.frees for k in range(len(plan.steps))]
    if boxed:
        last = {name: k for k, step in enumerate(plan.steps) for name in step_reads(step)}
        for b in plan.inputs:
            if b.name in last:
                freed[last[b.name]] = True
    found: list[_Group] = []
    growing: list[_Group] = []  # by place in the plan
    for k, step in enumerate(plan.steps):
        kernel = step.kernel if isinstance(step, KernelStep) else None
        if kernel is None or kernel_checks(kernel):
            growing = []  # what a call does with its memory is not known; and a kernel may raise before an input is written
            continue
        reads, writes = _places(plan, kernel.reads), _places(plan, kernel.writes)
        place = key(kernel)
        joined = next((g for g in growing if place is not None and g.key == place[0]), None)
        fresh = any(plan.allocations[name].kind == "dedicated" for name in kernel.writes)
        if joined is not None and ((fresh and joined.freed) or not joined.is_free_of(reads, writes)):
            growing.remove(joined)
            joined = None
        if joined is None and place is not None:
            joined = _Group(place[0], place[1], k)
            found.append(joined)
            growing = [*growing[-OPEN + 1 :], joined]
        if joined is not None:
            joined.members.append(kernel.name)
        for g in growing:
            # What runs before a group is as it was, whatever moves to it.
            if joined is None or joined.first >= g.first:
                g.meet(reads, writes)
            g.freed |= freed[k]
            g.steps += 1
        growing = [g for g in growing if len(g.members) < g.most and g.steps < REACH]
    return [tuple(g.members) for g in found if len(g.members) > 1]


@dataclass
class _Places:
    """Memory: whole buffers, and bytes of the arena from … to …."""

    buffers: set[str] = field(default_factory=set)
    starts: list[int] = field(default_factory=list)  # of parts that neither meet nor touch, in order
    ends: list[int] = field(default_factory=list)

    def meets(self, other: _Places) -> bool:
        """Whether some of it is also in `other`, which is small."""
        if not self.buffers.isdisjoint(other.buffers):
            return True
        for start, end in zip(other.starts, other.ends, strict=True):
            k = bisect.bisect_right(self.ends, start)
            if k < len(self.starts) and self.starts[k] < end:
                return True
        return False

    def add(self, start: int, end: int) -> None:
        first, behind = bisect.bisect_left(self.ends, start), bisect.bisect_right(self.starts, end)
        if first < behind:
            start, end = min(start, self.starts[first]), max(end, self.ends[behind - 1])
        self.starts[first:behind] = [start]
        self.ends[first:behind] = [end]

    def update(self, other: _Places) -> None:
        self.buffers |= other.buffers
        for start, end in zip(other.starts, other.ends, strict=True):
            self.add(start, end)


def _places(plan: Plan, names: Collection[str]) -> _Places:
    found = _Places()
    for name in names:
        of = allocation_root(plan, name)
        if plan.allocations[of].kind == "arena":
            at, size = arena_offset(plan, name), nbytes(plan.layouts[name])
            assert size is not None
            found.add(at, at + size)
        else:
            found.buffers.add(of)
    return found


@dataclass
class _Group:
    """What runs at its place and after it: `reads` and `writes`; `freed`: some of that is the last to use something."""

    key: Hashable
    most: int
    first: int
    members: list[str] = field(default_factory=list)
    reads: _Places = field(default_factory=_Places)
    writes: _Places = field(default_factory=_Places)
    freed: bool = False
    steps: int = 0

    def is_free_of(self, reads: _Places, writes: _Places) -> bool:
        return not (self.writes.meets(reads) or self.writes.meets(writes) or self.reads.meets(writes))

    def meet(self, reads: _Places, writes: _Places) -> None:
        self.reads.update(reads)
        self.writes.update(writes)


__all__ = ["horizontal_groups"]
