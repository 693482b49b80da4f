"""An error must find the inputs as eager has them at that point: which steps may raise after an input was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ..ir.guards import checks
from ..ir.nodes import Extern, Nest, Program
from ..kernels.plan import CopyStep, ExternStep, Kernel, KernelStep, Plan, Step
from .access import roots
from .memory import Memory


class ErrorOrder:
    """Follows a plan step by step. What the program computes before it writes an input, and what may raise, must be done before the write."""

    def __init__(self, program: Program, plan: Plan, memory: Memory, fail: Callable[[str], NoReturn]) -> None:
        self.memory, self.fail = memory, fail
        self.nests = {it.name: it for it in program.items if isinstance(it, Nest)}
        self.place: dict[str, int] = {}
        self.calls: list[tuple[Extern, int]] = []
        for k, it in enumerate(program.items):
            if isinstance(it, Extern):
                self.calls.append((it, k))
                self.place |= dict.fromkeys((b.name for b in it.outs), k)
            else:
                self.place[it.name] = k
        self.end = len(program.items)
        self.stored = {n for step in plan.steps if isinstance(step, KernelStep) for n in step.kernel.writes}
        self.last = ("", -1)  # of the inputs' new contents so far the one that comes last in the program

    def step(self, step: Step) -> None:
        """Raises PlanError where the step may raise too late."""
        name, place = self.last
        first = self._raising(step)
        if first is not None and first < place:
            self.fail(f"it may raise, but {name!r}, which the program computes later, is written into an input already")
        for name, place in self._written(step):
            if isinstance(step, KernelStep) and _checks(step.kernel):
                self.fail(f"it writes {name!r} into an input, and finds out meanwhile whether positions are in range")
            if place > self.last[1]:
                self.last = (name, place)

    def _written(self, step: Step) -> list[tuple[str, int]]:
        """What a step stores into the memory of inputs, with its place in the program."""
        if isinstance(step, CopyStep):
            return [(step.source, self.end)]
        names = step.kernel.writes if isinstance(step, KernelStep) else step.out
        inside = (n for n in names if self.memory.region(n).storage.startswith("input "))
        return [(n, self.place.get(n, self.end)) for n in inside]

    def _raising(self, step: Step) -> int | None:
        """The place in the program of the first item that may raise in a step."""
        if isinstance(step, ExternStep):
            return next((k for call, k in self.calls if call == step.call), None)
        if not isinstance(step, KernelStep):
            return None
        found = [self._raising(part) for part in step.kernel.parts]
        if told := _checks(step.kernel):
            # What is stored is what the program defines (another check), out of what is stored elsewhere.
            left, seen = [*step.kernel.writes, *step.kernel.defines], set[str]()
            while left:
                name = left.pop()
                nest = self.nests.get(name)
                if nest is not None and name not in seen:
                    seen.add(name)
                    left += [n for n in nest.reads() if n not in self.stored]
            faults = {n: checks(_roots(self.nests[n])) for n in seen}
            found += [self.place[n] for n in seen if not told.isdisjoint(faults[n])]
            known = {fault for n in seen for fault in faults[n]}
            if not told <= known:
                found.append(0)
        return min((k for k in found if k is not None), default=None)


def _checks(kernel: Kernel) -> set[tuple[str, str]]:
    return set(checks(n for p in kernel.phases for st in p.body for n in roots(st)))


def _roots(nest: Nest) -> list:
    scatter = nest.scatter
    if scatter is None:
        return [nest.body]
    inside = [a.node for e in scatter.index for a in e.atoms() if hasattr(a, "node")]
    return [nest.body, *inside, *([] if scatter.mask is None else [scatter.mask])]


__all__ = ["ErrorOrder"]
