"""Why two steps of a plan are not one kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..runtime.ir.nodes import Nest, Program
from ..runtime.kernels.plan import CopyStep, ExternStep, KernelStep, Plan, Step
from ..runtime.kernels.steps import step_reads

__all__ = ["Apart"]


class Apart:
    """Answers for one plan, from what the fuser noted; `made` is the step that makes each buffer."""

    def __init__(self, plan: Plan, made: Mapping[str, int], program: Program | None) -> None:
        self.steps: Sequence[Step] = plan.steps
        self.items = {it.name: it for it in program.items if isinstance(it, Nest)} if program is not None else {}
        self.made = made
        self.of: dict[str, int] = {}
        for k, step in enumerate(plan.steps):
            if isinstance(step, KernelStep):
                self.of.update(dict.fromkeys(step.kernel.defines, k))
        self.pairs: dict[tuple[int, int], str] = {}
        self.alone: dict[int, str] = {}
        for refusal in plan.refused:
            reader, other = self.of.get(refusal.item), self.of.get(refusal.other)
            if reader is None:
                continue
            if not refusal.other:
                self.alone.setdefault(reader, refusal.why)
            elif other is not None and other != reader:
                self.pairs.setdefault((min(other, reader), max(other, reader)), refusal.why)

    def why(self, first: int, then: int) -> str:
        """Of two steps, in order."""
        for k in (first, then):
            step = self.steps[k]
            if isinstance(step, ExternStep):
                return (
                    f"{step.call.target or 'a size'} is a library call"
                    if step.call.target
                    else "sizes are computed in between"
                )
            if isinstance(step, CopyStep):
                return "an input is written when the graph ends"
        if (known := self.pairs.get((first, then))) is not None:
            return known
        for k in (then, first):
            if k in self.alone:
                return self.alone[k]
        latest = max(
            (self.made[n] for n in step_reads(self.steps[then]) if n in self.made and self.made[n] < then), default=-1
        )
        if latest > first:
            what = next(n for n in step_reads(self.steps[then]) if self.made.get(n) == latest)
            step = self.steps[latest]
            by = (
                step.kernel.name
                if isinstance(step, KernelStep)
                else step.call.target
                if isinstance(step, ExternStep)
                else "a copy"
            )
            return (
                f"it also reads {what}, which {by} makes later: a kernel is joined to the latest of those that it reads"
            )
        return self._begun_elsewhere(first, then) or "unknown"

    def _begun_elsewhere(self, first: int, then: int) -> str:
        """Where the kernel `then` was begun by a value that needs nothing of `first`, and what reads `first` joined it; else ""."""
        begin, before = self.steps[then], self.steps[first]
        if not isinstance(begin, KernelStep) or not isinstance(before, KernelStep) or not begin.kernel.defines:
            return ""
        start = begin.kernel.defines[0]
        left, seen = [start], {start}
        while left:
            name = left.pop()
            if (item := self.items.get(name)) is None:
                return ""  # made by the target: what it reads is not known here
            for read in {*item.reads()} - seen:
                seen.add(read)
                if self.of.get(read) == first:
                    return ""
                if read in self.items and read not in self.made and self.of.get(read, then) == then:
                    left.append(read)  # its body is in this kernel
        return (
            f"{begin.kernel.name} begins with {start}, which needs nothing of {before.kernel.name}; "
            "what does need it was joined there, to the later of the two"
        )
