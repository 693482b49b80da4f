"""Memory planning: where each stored buffer lives. One arena for each graph, planned on the final order."""

from __future__ import annotations

import bisect
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from ..ir.index import Expr
from ..ir.nodes import Buffer
from ..ir.routines import is_users
from ..kernels.plan import Allocation, ExternStep, KernelStep, Plan, Reduce, Step, Store, ViewOf
from ..kernels.statements import statement_nodes
from ..kernels.steps import allocation_root, arena_offset, flat_index, nbytes, step_parts, step_reads, step_writes

ALIGN = 64  # bytes: whole vectors of every target, and torch's own alignment


@dataclass
class Arena:
    """First-fit by offset with coalescing. Sizes in bytes."""

    top: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)

    def take(self, size: int) -> int:
        size = -(-max(size, 1) // ALIGN) * ALIGN
        best = min((k for k, (_, n) in enumerate(self.free) if n >= size), key=lambda k: self.free[k][1], default=None)
        if best is not None:
            at, n = self.free.pop(best)
            if n > size:
                bisect.insort(self.free, (at + size, n - size))
            return at
        if self.free and self.free[-1][0] + self.free[-1][1] == self.top:
            at, _ = self.free.pop()
        else:
            at = self.top
        self.top = at + size
        return at

    def give(self, at: int, size: int) -> None:
        size = -(-max(size, 1) // ALIGN) * ALIGN
        k = bisect.bisect(self.free, (at, size))
        if k < len(self.free) and at + size == self.free[k][0]:
            size += self.free.pop(k)[1]
        if k > 0 and self.free[k - 1][0] + self.free[k - 1][1] == at:
            at, before = self.free[k - 1]
            size += before
            self.free.pop(k - 1)
            k -= 1
        self.free.insert(k, (at, size))


def plan_memory(plan: Plan, stored: Mapping[str, str], *, large: float = math.inf, arena: bool = True) -> None:
    """Fill `plan.allocations`, `plan.frees` and `plan.arena_bytes`.

    stored  buffers that are written into the memory of an input, with that input.
    large   buffers of so many bytes or more are allocated only while they live; the arena stays.
    arena   whether there is one; otherwise all buffers are allocated only while they live.
    """
    last: dict[str, int] = {}
    for k, step in enumerate(plan.steps):
        for name in (*step_reads(step), *step_writes(step)):
            last[name] = k
    held = {o.buffer for o in plan.outputs if o.buffer is not None}
    for b in plan.inputs:
        plan.allocations[b.name] = Allocation("input")
    escaping, given = _escaping(plan, held, last), _given_away(plan)
    space = Arena()
    size_of: dict[str, int] = {}
    owned: set[str] = set()  # values with dedicated memory, which another may get when they die
    dying: dict[int, list[str]] = {}
    for name, k in last.items():
        dying.setdefault(k, []).append(name)
    for k, step in enumerate(plan.steps):
        passed = {n for part in step_parts(step) for n in step_writes(part)} - set(step_writes(step))
        plan.allocations |= dict.fromkeys(sorted(passed), Allocation("elided"))
        mutable = isinstance(step, KernelStep) or (isinstance(step, ExternStep) and step.out)
        for name in step_writes(step):
            if name in plan.allocations:
                continue  # an indexed update of what the step before has copied
            layout = plan.layouts[name]
            size = nbytes(layout)
            if name in stored:
                plan.allocations[name] = Allocation("alias", 0, stored[name])
            elif not mutable:
                plan.allocations[name] = Allocation("extern")
            elif name in given or name in held or name in escaping or size is None or not arena or size >= large:
                reused = in_place_candidate(step, name, plan, last, k, owned)
                if reused is not None:
                    owned.discard(reused)
                plan.allocations[name] = Allocation("dedicated") if reused is None else Allocation("alias", 0, reused)
                if name not in held and name not in given:
                    owned.add(name)
            else:
                reused = in_place_candidate(step, name, plan, last, k, size_of)
                if reused is not None:
                    plan.allocations[name] = Allocation("alias", 0, reused)
                    size_of[name] = size_of.pop(reused)
                else:
                    plan.allocations[name] = Allocation("arena", space.take(size))
                    size_of[name] = size
        gone: list[str] = []
        for name in dying.get(k, ()):
            if name in size_of:
                space.give(arena_offset(plan, name), size_of.pop(name))
            elif name in owned or (name not in held and _is_freed(plan, name, given)):
                gone.append(allocation_root(plan, name))
        if gone:
            plan.frees[k] = tuple(sorted(gone))
    plan.arena_bytes = space.top


def _escaping(plan: Plan, held: Container[str], last: Mapping[str, int]) -> set[str]:
    """Values that calls overwrite, and whose memory escapes with the results."""
    found: set[str] = set()
    for k in range(len(plan.steps) - 1, -1, -1):
        step = plan.steps[k]
        for name in step_writes(step) if isinstance(step, ExternStep) else ():
            if name in held or name in found:
                found.update(n for n in written_over(step, name, plan.layouts) if last[n] == k)
    return found


def _is_freed(plan: Plan, name: str, given: Container[str]) -> bool:
    """Whether the memory of a dead value is freed that no other value may reuse."""
    kind = plan.allocations[allocation_root(plan, name)].kind
    return plan.allocations[name].kind == "extern" or (name in given and kind == "dedicated")


def _given_away(plan: Plan) -> set[str]:
    """Arguments of the program's own functions, which may keep them: nothing writes into that memory again."""
    return {
        name
        for step in plan.steps
        if isinstance(step, ExternStep) and not step.call.writes and is_users(step.call)
        for name in step_reads(step)
    }


def in_place_candidate(
    step: Step, name: str, plan: Plan, last: dict[str, int], k: int, among: Container[str]
) -> str | None:
    """A buffer that dies here, whose memory can hold the result `name`."""
    held = (
        could_hold(step, name, plan.layouts) if isinstance(step, KernelStep) else written_over(step, name, plan.layouts)
    )
    return next((c for c in held if c in among and last.get(c) == k), None)


def written_over(step: Step, name: str, layouts: Mapping[str, Buffer]) -> tuple[str, ...]:
    """Of a call that writes into its arguments: the buffer whose new contents `name` is, if it is all of that buffer, with the same layout, and the
    call reads that nowhere else.
    """
    if not isinstance(step, ExternStep) or not step.call.writes:
        return ()
    before = step.args[step.out.index(name)]
    if before is None:
        return ()
    old, new = layouts[before.buffer], layouts[name]
    if isinstance(before, ViewOf) and (before.shape, before.stride, before.offset) != (
        old.shape,
        old.stride,
        old.offset,
    ):
        return ()
    same = (old.dtype, old.shape, old.stride, old.offset) == (new.dtype, new.shape, new.stride, new.offset)
    return (before.buffer,) if same and _count(step.args, before.buffer) == 1 else ()


def _count(tree: object, buffer: str) -> int:
    if isinstance(tree, (list, tuple)):
        return sum(_count(x, buffer) for x in tree)
    return getattr(tree, "buffer", None) == buffer


def could_hold(step: KernelStep, name: str, layouts: Mapping[str, Buffer]) -> tuple[str, ...]:
    """The buffers that have the layout of `name`, may share its memory, and are read only at the element of `name` that is written, in the same
    phase.
    """
    target = layouts[name]
    stores = [
        (i, s)
        for i, p in enumerate(step.kernel.phases)
        for s in p.body
        if not isinstance(s, Reduce) and s.buffer == name
    ]
    if len(stores) != 1:
        return ()
    at, store = stores[0]
    if type(store) is not Store or store.mode != "set" or store.mask is not None:
        return ()
    where = flat_index(store.index, target)
    return tuple(
        other
        for other in step.kernel.reads
        if (other, name) not in step.kernel.no_alias
        and (layout := layouts[other]).dtype == target.dtype
        and (layout.shape, layout.stride) == (target.shape, target.stride)
        and _read_only_there(step, other, layout, at, store, where)
    )


def _read_only_there(step: KernelStep, buffer: str, layout: Buffer, at: int, store: Store, where: Expr) -> bool:
    """Whether every read of `buffer` is of the element that `store` (in phase `at`) writes, and none comes after it."""
    for i, phase in enumerate(step.kernel.phases):
        for st in phase.body:
            for node in statement_nodes(st):
                for ld in node.loads():
                    if ld.attr.buffer != buffer:
                        continue
                    later = i > at or (i == at and phase.body.index(st) > phase.body.index(store))
                    if later or flat_index(ld.attr.index, layout) is not where:
                        return False
    return True
