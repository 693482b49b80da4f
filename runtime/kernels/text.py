"""A plan as text for readers: kernels with their loops, calls of eager kernels, and where every buffer lives."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.index import Expr, Var
from ..ir.nodes import Buffer, Size
from .plan import Accumulate, Allocation, CopyStep, ExternStep, Kernel, KernelStep, Plan, Reduce, Scan, Statement
from .work import Sizes, step_name, total, work_of

__all__ = ["fusion_text", "plan_text", "steps_text", "work_text"]


def plan_text(plan: Plan) -> str:
    """One line for each step, loop and statement, then one for each allocation; ends with a newline."""
    lines = [f"memory: arena of {plan.arena_bytes} bytes"]
    lines += [
        f"  {name}: {_allocation(place)}{_layout(plan.layouts.get(name))}" for name, place in plan.allocations.items()
    ]
    return steps_text(plan) + "\n".join(lines) + "\n"


def steps_text(plan: Plan) -> str:
    """One line for each step, loop and statement, also of a plan whose memory is not placed yet; ends with a newline, or is empty."""
    lines: list[str] = []
    for number, step in enumerate(plan.steps):
        if isinstance(step, KernelStep):
            lines += _kernel(step.kernel)
        elif isinstance(step, ExternStep):
            lines.append(_extern(step))
        elif isinstance(step, CopyStep):
            lines.append(f"copy {step.source} -> {step.target}")
        if dead := plan.frees.get(number):
            lines.append(f"free {', '.join(dead)}")
    return "".join(f"{line}\n" for line in lines)


def fusion_text(plan: Plan) -> str:
    """What each kernel computes, with the lines of the program that it comes from, and the calls of eager kernels between them."""
    lines: list[str] = []
    for step in plan.steps:
        if isinstance(step, KernelStep):
            k = step.kernel
            lines.append(f"kernel {k.name}: of {', '.join(k.defines)}; {', '.join(k.reads)} -> {', '.join(k.writes)}")
            lines += [f"  {origin.removesuffix(': ')}" for origin in k.origins]
        elif isinstance(step, ExternStep):
            lines.append(_extern(step))
    return "\n".join(lines) + "\n"


def work_text(plan: Plan) -> str:
    """What each step reads, writes and computes, and all of them together: estimates, where sizes are numbers."""
    sizes = Sizes(plan, (), None)
    works = [work_of(step, plan, sizes) for step in plan.steps]
    lines = []
    for step, work in zip(plan.steps, works, strict=True):
        read, written = (_count(total(table.values()), "bytes") for table in (work.reads, work.writes))
        lines.append(f"{step_name(step)}: reads {read}, writes {written}, {_count(work.operations, 'operations')}")
    moved, operations = total(w.moved for w in works), total(w.operations for w in works)
    lines.append(f"all: moves {_count(moved, 'bytes')}, {_count(operations, 'operations')}")
    return "\n".join(lines) + "\n"


def _count(number: float | None, unit: str) -> str:
    return f"an unknown number of {unit}" if number is None else f"{number:,.0f} {unit}"


def _extern(step: ExternStep) -> str:
    made = ", ".join(b.name for b in step.call.outs)
    learned = "".join(f", size {s.symbol}" for s in step.call.learns)
    return f"extern {step.call.target or 'nothing'}({', '.join(step.call.reads())}){made and ' -> ' + made}{learned}"


def _kernel(k: Kernel) -> Iterator[str]:
    if k.parts:
        yield f"kernel {k.name}({', '.join(k.reads)}) -> {', '.join(k.writes)}: as one"
        for part in k.parts:
            yield from (
                f"  {line}" for line in ([_extern(part)] if isinstance(part, ExternStep) else _kernel(part.kernel))
            )
        return
    order = " in order" if k.serial else f", serial grid loop {_loops(k.grid_loop)}" if k.grid_loop else ""
    order += f", each by {k.splits} programs" if k.splits > 1 else ""
    yield f"kernel {k.name}({', '.join((*k.reads, *k.symbols))}) -> {', '.join(k.writes)}: for {_loops(k.outer)}{order}"
    for tile in k.scratch:
        yield f"  tile {tile.name}{_layout(tile)}"
    for phase in k.phases:
        yield f"  for {_loops(phase.inner)}"
        yield from (f"    {_statement(s)}" for s in phase.body)


def _loops(loops: tuple[Var, ...]) -> str:
    return ", ".join(f"{v.name}<{_size(v.extent)}" for v in loops) or "one point"


def _statement(s: Statement) -> str:
    if isinstance(s, Reduce):
        return f"reduce {s.name} by {s.kind}"
    index = ", ".join(str(e) for e in s.index)
    how = (
        f"scan {s.kind}"
        if isinstance(s, Scan)
        else f"accumulate {s.kind}"
        if isinstance(s, Accumulate)
        else "store"
        if s.mode == "set"
        else f"update {s.mode}"
    )
    return f"{how} {s.buffer}[{index}]"


def _allocation(place: Allocation) -> str:
    if place.kind == "alias":
        return f"alias of {place.of}" + (f" + {place.offset} bytes" if place.offset else "")
    return f"arena + {place.offset} bytes" if place.kind == "arena" else place.kind


def _layout(b: Buffer | None) -> str:
    if b is None:
        return ""
    stride = f" stride [{', '.join(_size(n) for n in b.stride)}]" if b.stride is not None else ""
    return f", {b.dtype}[{', '.join(_size(n) for n in b.shape)}]{stride}"


def _size(n: Size | Expr) -> str:
    return str(n)
