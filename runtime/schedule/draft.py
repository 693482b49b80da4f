"""A program on its way to a plan: what the passes of `pipeline.py` take and leave, and how it reads in between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from ..fuse.groups import Group
from ..fuse.products import Selector
from ..ir.nodes import Buffer, Extern, Nest, Output, Program, Size
from ..ir.text import dump
from ..kernels.operands import Factors
from ..kernels.plan import Plan, Refusal, Step, ViewOf
from ..kernels.text import plan_text, steps_text
from ..machine import PORTABLE, Gpu, Machine

__all__ = ["Draft", "Options"]


@dataclass(frozen=True)
class Options:
    """What a schedule is made for.

    costs         relative cost of a scalar operation by name.
    fusion        several nests may be one kernel.
    minimize_memory  large values have memory only while they live: slower than in an arena that stays, and less beside what training keeps.
    machine       that the plan is for: a GPU has registers where a processor has caches, and runs many programs side by side.
    arena         intermediate values share one block of memory; without, each is allocated by itself.
    out_variants  whether an extern call can write into memory that the plan gives it.
    row_bytes     at multiples of how many bytes the rows of an extern call's matrices should start, on a GPU.
    any_strides   whether an extern call takes its arguments with whatever strides; any other gets those that the program gave them.
    factors       which arguments of an extern call it multiplies, if it is a product of matrices that a kernel may compute, likewise.
    select        which products gain by a kernel that also computes what is beside them.
    """

    costs: Callable[[str], float] = lambda _: 1
    fusion: bool = True
    minimize_memory: bool = False
    machine: Machine = PORTABLE
    arena: bool = True
    out_variants: Callable[[Extern], bool] = lambda _: False
    row_bytes: Callable[[Extern], int] = lambda _: 0
    any_strides: Callable[[Extern], bool] = lambda _: False
    factors: Factors = lambda _: None
    select: Selector | None = None

    @property
    def gpu(self) -> Gpu | None:
        """The machine, where it is a GPU."""
        return self.machine if isinstance(self.machine, Gpu) else None


@dataclass
class Draft:
    """exact, gaps  strides that an extern call must get an argument with, and which of these no view of a dense tensor has.

    items     nests and calls that are left, in order; `last`: of these, the ones behind all that may raise.
    bodies    of values that are mere views.
    layouts   of each buffer; `as_views`: those that are a view of another one; `fills`: bases of indexed updates, made where the update is.
    groups    what is to be one kernel, or a call; `tail`: those of `last`; `refused`: why nests are apart.
    steps     in order; `end`: those of the tail.
    outputs   as the caller gets them.
    stored    buffers in the memory of an input, with that input.
    """

    program: Program
    options: Options
    exact: Mapping[str, tuple[Size, ...]] = field(default_factory=dict)
    gaps: Collection[str] = ()
    items: list[Nest | Extern] = field(default_factory=list)
    last: list[Nest] = field(default_factory=list)
    bodies: Mapping[str, Nest] = field(default_factory=dict)
    layouts: dict[str, Buffer] = field(default_factory=dict)
    as_views: dict[str, ViewOf] = field(default_factory=dict)
    fills: dict[str, Nest] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    tail: list[Group] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    end: list[Step] = field(default_factory=list)
    outputs: list[Output | ViewOf] = field(default_factory=list)
    stored: dict[str, str] = field(default_factory=dict)
    plan: Plan | None = None

    @property
    def gpu(self) -> Gpu | None:
        """The machine, where it is a GPU."""
        return self.options.gpu

    @property
    def held(self) -> set[str]:
        """Buffers that are returned."""
        return {o.buffer for o in self.outputs if o.buffer is not None}

    @property
    def returned(self) -> dict[str, int]:
        """How often each buffer of the program is returned."""
        found: dict[str, int] = {}
        for o in self.program.outputs:
            if o.buffer is not None:
                found[o.buffer] = found.get(o.buffer, 0) + 1
        return found

    def text(self) -> str:
        """The draft for a reader: the plan, else its steps, groups or items, whatever it has come to."""
        if self.plan is not None:
            return plan_text(self.plan)
        if self.steps or self.end:
            return steps_text(Plan(self.program.inputs, [*self.steps, *self.end], tuple(self.outputs)))
        if groups := [*self.groups, *self.tail]:
            return "".join(f"{_group(group)}\n" for group in groups)
        return dump(replace(self.program, items=[*self.items, *self.last] or self.program.items))


def _group(group: Group) -> str:
    if group.extern is not None:
        return f"call {group.extern.target}"
    loops = ", ".join(f"{v.name}<{v.extent}" for v in group.outer)
    return f"kernel for {loops or 'one point'}: {', '.join(m.name for m in group.members)}"
