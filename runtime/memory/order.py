"""The order of steps that keeps the least memory alive at once. Kernels are given; only their order among each other is open."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..ir.nodes import Buffer
from ..kernels.plan import ExternStep, KernelStep, Step
from ..kernels.statements import kernel_checks
from ..kernels.steps import nbytes, step_reads, step_writes
from .arena import could_hold

WORTH = 0.97  # of the peak before: neighbours in the given order share more of the caches
WINDOW = 8  # steps that may run next, of which the best is taken


@dataclass
class _Steps:
    """Steps as numbers: what each waits for, and which bytes it takes and lets go."""

    steps: Sequence[Step]
    size: dict[str, int] = field(default_factory=dict)  # of values with memory of their own
    reads: list[tuple[str, ...]] = field(default_factory=list)
    writes: list[tuple[str, ...]] = field(default_factory=list)
    before: list[set[int]] = field(default_factory=list)
    after: list[set[int]] = field(default_factory=list)
    readers: dict[str, int] = field(default_factory=dict)
    reuse: list[list[tuple[str, tuple[str, ...]]]] = field(default_factory=list)  # results, with what could hold them


def least_memory(steps: list[Step], layouts: Mapping[str, Buffer], held: Collection[str], large: int) -> list[Step]:
    """The steps in the order with the lowest peak that was found, or as they are where none is much lower, or a size is symbolic or learned
    by a step.

    large bytes of values that count: smaller ones stay in the arena.
    held  buffers that are returned. Steps that may raise, draw random numbers or have effects keep their order among each other.
    """
    if len(steps) < 3 or any(nbytes(b) is None for b in layouts.values()):
        return steps
    if any(isinstance(s, ExternStep) and s.call.learns for s in steps):
        return steps
    found = _steps(steps, layouts, large)
    given = list(range(len(steps)))
    greedy = _greedy(found, held)
    orders = (given, _late(found, given), greedy, _late(found, greedy))
    peaks = [_peak(found, order, held) for order in orders]
    best = min(range(len(orders)), key=peaks.__getitem__)
    return [steps[k] for k in orders[best]] if peaks[best] < WORTH * peaks[0] else steps


def _steps(steps: Sequence[Step], layouts: Mapping[str, Buffer], large: int) -> _Steps:
    out = _Steps(steps)
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    tied = -1
    for k, step in enumerate(steps):
        reads, writes = step_reads(step), step_writes(step)
        planned = isinstance(step, KernelStep) or (
            isinstance(step, ExternStep) and bool(step.out) and not step.call.writes
        )
        waits = {writer[n] for n in reads if n in writer}
        for n in writes:
            waits.update(readers.get(n, ()))
            if n in writer:
                waits.add(writer[n])
            bytes_ = nbytes(layouts[n]) or 0
            out.size[n] = bytes_ if bytes_ >= large or not planned else 0
        if not planned or (isinstance(step, KernelStep) and kernel_checks(step.kernel)):
            if tied >= 0:
                waits.add(tied)
            tied = k
        first = tuple(n for n in writes if n not in writer)
        writer.update((n, k) for n in writes)
        for n in reads:
            readers.setdefault(n, []).append(k)
        waits.discard(k)
        out.reads.append(reads)
        out.writes.append(first)
        out.before.append(waits)
        out.after.append(set())
        for j in waits:
            out.after[j].add(k)
        out.reuse.append(
            [(n, could_hold(step, n, layouts)) for n in first if out.size[n]] if isinstance(step, KernelStep) else []
        )
    out.readers = {n: len(ks) for n, ks in readers.items()}
    return out


@dataclass
class _Alive:
    """What a run of the steps so far has alive."""

    of: _Steps
    held: Collection[str]
    left: dict[str, int]
    bytes: int = 0

    def effect(self, k: int) -> tuple[int, int]:
        """Bytes alive while step `k` runs and after it."""
        of = self.of
        dying = {n for n in of.reads[k] if n not in self.held and self.left[n] == 1 and of.size.get(n)}
        taken = {n: of.size[n] for n in of.writes[k]}
        for name, candidates in of.reuse[k]:
            other = next((c for c in candidates if c in dying), None)
            if other is not None and of.size[other] == taken[name]:
                dying.discard(other)
                taken[name] = 0
        during = self.bytes + sum(taken.values())
        unread = sum(of.size[n] for n in of.writes[k] if n not in self.held and not of.readers.get(n))
        return during, during - sum(of.size[n] for n in dying) - unread

    def run(self, k: int) -> int:
        during, self.bytes = self.effect(k)
        for n in self.of.reads[k]:
            self.left[n] -= 1
        return during


def _peak(of: _Steps, order: Sequence[int], held: Collection[str]) -> int:
    alive = _Alive(of, held, dict(of.readers))
    return max(alive.run(k) for k in order)


def _greedy(of: _Steps, held: Collection[str]) -> list[int]:
    """Of the steps that may run next, always the one that leaves the least alive; of equals the first."""
    alive = _Alive(of, held, dict(of.readers))
    waiting = [len(b) for b in of.before]
    ready = [k for k, n in enumerate(waiting) if n == 0]
    order: list[int] = []
    while ready:
        at = min(range(min(len(ready), WINDOW)), key=lambda i: alive.effect(ready[i])[1])
        k = ready.pop(at)
        alive.run(k)
        order.append(k)
        for j in of.after[k]:
            waiting[j] -= 1
            if waiting[j] == 0:
                bisect.insort(ready, j)
    return order


def _late(of: _Steps, order: Sequence[int]) -> list[int]:
    """Steps that take more than they let go run as late as they may: right before the first that needs them."""
    out: list[int] = []  # from the last to the first
    goal: dict[int, int] = {}
    for k in reversed(order):
        taken = sum(of.size[n] for n in of.writes[k])
        let_go = sum(of.size.get(n, 0) for n in of.reads[k] if of.readers[n] == 1)
        needed = of.after[k]
        if taken > let_go and needed:
            at = next(i for i in range(len(out), 0, -1) if out[i - 1] in needed)
            goal[k] = out[at - 1]
            while at < len(out) and goal.get(out[at]) == goal[k]:
                at += 1  # those that wait for the same step keep their order
            out.insert(at, k)
        else:
            out.append(k)
    return out[::-1]
