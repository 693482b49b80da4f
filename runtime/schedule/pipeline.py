"""From a functional program to a plan, in passes. Each takes a draft, and says what it leaves in it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..fuse.arguments import exact_strides, extern_step, only_views, with_gaps
from ..fuse.attention import join_products
from ..fuse.build import build_kernel, build_update
from ..fuse.groups import Group
from ..fuse.inline import inline
from ..fuse.known_first import known_first
from ..fuse.nests import Fuser
from ..fuse.outer_reductions import fuse_outer_reductions
from ..fuse.products import fuse_products
from ..fuse.small import fuse_small
from ..fuse.updates import update_in_place, without_copies
from ..ir.learned import learned_by
from ..ir.nodes import ITEMSIZE, Program
from ..ir.quote import identifier
from ..ir.work import in_any_order
from ..kernels.plan import CopyStep, KernelStep, Plan, Step, ViewOf
from ..kernels.steps import step_parts, step_reads, step_writes
from ..lower.outputs import separate_outputs
from ..memory.arena import plan_memory
from ..memory.in_place import write_in_place
from ..memory.order import least_memory
from .draft import Draft, Options
from .lay_out import lay_out
from .legal import legal_kernel

__all__ = ["PASSES", "Options", "schedule"]

OnPass = Callable[[str, Draft], None]
PLAIN = Options()


def schedule(program: Program, options: Options = PLAIN, on_pass: OnPass | None = None) -> Plan:
    """Schedule a verified program. `on_pass` gets the name of each pass and the draft that it has left. Raises `UnsupportedError` for a kernel
    that the machine does not run.
    """
    draft = Draft(program, options)
    for one in PASSES:
        one(draft)
        if on_pass is not None:
            on_pass(one.__name__, draft)
    assert draft.plan is not None
    return draft.plan


def settle_strides(draft: Draft) -> None:
    """Takes the program. Leaves one whose outputs are buffers of their own and whose inputs are not copied for an update, and the strides that calls
    must get their arguments with.
    """
    any_strides = draft.options.any_strides
    draft.program = without_copies(separate_outputs(draft.program, only_views(draft.program, any_strides)))
    draft.exact = exact_strides(draft.program.items, any_strides)
    draft.gaps = with_gaps(draft.program, draft.exact)


def inline_values(draft: Draft) -> None:
    """Leaves items whose bodies have absorbed what is computed where it is read, in an order in which what is known early comes first."""
    options = draft.options
    draft.items, views = inline(draft.program, options.costs, options.machine, draft.gaps)
    draft.bodies = views.bodies
    if options.fusion:
        draft.items = known_first(draft.items, {b.name for b in draft.program.inputs})


def group(draft: Draft) -> None:
    """Takes items with layouts. Leaves groups of nests that are one kernel each, and why others are apart."""
    learned = learned_by([*draft.items, *draft.last])
    fuser = Fuser(draft.options.fusion, draft.gpu, draft.layouts, learned)
    for it in draft.items:
        fuser.add(it)
    fuser.first = len(fuser.groups)
    for nest in draft.last:
        fuser.add(nest)
    draft.groups, draft.tail = fuser.groups[: fuser.first], fuser.groups[fuser.first :]
    draft.refused = fuser.refused


def merge(draft: Draft) -> None:
    """Leaves fewer groups for a GPU: sums over columns go with the rows, small groups with others."""
    gpu, options = draft.gpu, draft.options
    if not gpu:
        return
    draft.groups = fuse_outer_reductions(draft.groups, draft.as_views, gpu)
    if options.fusion and not learned_by([*draft.items, *draft.last]):
        held, stores = draft.returned, draft.program.mutations
        draft.groups = fuse_small(draft.groups, draft.as_views, draft.layouts, gpu.costs, held, stores)


def build(draft: Draft) -> None:
    """Takes groups. Leaves a step for each: a kernel that the machine can run, or a call."""
    needed, numbers = _needed(draft), itertools.count()
    written = {target for target, _ in draft.program.mutations}
    for groups, steps in ((draft.groups, draft.steps), (draft.tail, draft.end)):
        for one in groups:
            steps += _steps(one, needed, written, numbers, draft)


def return_views(draft: Draft) -> None:
    """Leaves the outputs as views of the buffers that hold them."""
    for o in draft.program.outputs:
        if o.buffer is None:
            draft.outputs.append(o)
            continue
        view = draft.as_views.get(o.buffer)
        if view is None:
            b = draft.layouts[o.buffer]
            assert b.stride is not None
            view = ViewOf(b.name, b.shape, b.stride, b.offset)
        draft.outputs.append(replace(view, paired=o.paired))


def join_steps(draft: Draft) -> None:
    """Leaves fewer steps for a GPU: attention is one, and products go with what is beside them where that gains."""
    gpu, options = draft.gpu, draft.options
    if not gpu or not options.fusion:
        return
    later = _read_later(draft)
    draft.steps = join_products(draft.steps, draft.layouts, later, options.factors, gpu)
    if options.select is not None:
        draft.steps = fuse_products(
            draft.steps, draft.layouts, later, options.factors, options.costs, gpu, options.select
        )


def order(draft: Draft) -> None:
    """Leaves all steps, in the order that needs least memory where memory is short."""
    if draft.options.minimize_memory:
        draft.steps = least_memory(
            draft.steps, draft.layouts, _read_later(draft), draft.options.machine.costs.allocation
        )
    draft.steps, draft.end = [*draft.steps, *draft.end], []


def write_inputs(draft: Draft) -> None:
    """Leaves the steps that give inputs their new contents: kernels that store there at once, where nobody can tell, or copies."""
    program, layouts, held = draft.program, draft.layouts, draft.held
    draft.steps, updated = update_in_place(draft.steps, program, layouts, held)
    draft.stored = updated | write_in_place(draft.steps, program, layouts, held, updated)
    draft.steps += [CopyStep(target, source) for target, source in program.mutations if source not in draft.stored]


def place(draft: Draft) -> None:
    """Leaves the plan, with a place in memory for each buffer."""
    program, steps, outputs = draft.program, draft.steps, tuple(draft.outputs)
    refused = tuple(draft.refused)
    plan = Plan(program.inputs, steps, outputs, draft.layouts, symbols=program.symbols, refused=refused)
    large = draft.options.machine.costs.allocation if draft.options.minimize_memory else math.inf
    plan_memory(plan, draft.stored, large=large, arena=draft.options.arena)
    kept = {n for s in steps for part in (s, *step_parts(s)) for n in _step_buffers(part)}
    kept |= {b.name for b in program.inputs} | draft.held
    plan.layouts = {n: b for n, b in draft.layouts.items() if n in kept}
    draft.plan = plan


PASSES: tuple[Callable[[Draft], None], ...] = (
    settle_strides,
    inline_values,
    lay_out,
    group,
    merge,
    build,
    return_views,
    join_steps,
    order,
    write_inputs,
    place,
)


def _steps(one: Group, needed: set[str], written: set[str], numbers: Iterator[int], draft: Draft) -> list[Step]:
    """The steps of a group; none where nothing is `needed` of it. `written`: inputs that kernels may store over."""
    options, layouts = draft.options, draft.layouts
    if one.extern is not None:
        return [extern_step(one.extern, draft.as_views, layouts, options.out_variants, options.any_strides)]
    mine = {m.name for m in one.members} & needed
    if not mine:
        return []
    name = _kernel_name(next(numbers), one)
    scatter = one.members[0].scatter
    if draft.gpu and scatter is not None and in_any_order(scatter):
        return [KernelStep(k) for k in build_update(one, name, layouts, draft.fills, draft.gpu)]
    made = functools.partial(
        build_kernel, one, name, mine, layouts, options.costs, ITEMSIZE.__getitem__, options.machine, over=written
    )
    return [KernelStep(legal_kernel(made, layouts) if draft.gpu else made())]


def _needed(draft: Draft) -> set[str]:
    """Buffers that must be in memory: read by another group, by an extern call, returned, or copied to an input."""
    views = draft.as_views

    def stored(name: str) -> str:
        return views[name].buffer if name in views else name

    needed = {stored(name) for name in draft.returned} | {source for _, source in draft.program.mutations}
    for one in reversed([*draft.groups, *draft.tail]):
        if one.extern is not None:
            needed.update(map(stored, one.extern.reads()))
            continue
        names = {m.name for m in one.members}
        if names & needed:
            needed.update(n for m in one.members for n in m.nest.reads() if n not in names)
    return needed


def _read_later(draft: Draft) -> set[str]:
    """What is read behind the steps that may be moved."""
    sources = {source for _, source in draft.program.mutations}
    return draft.held | {n for s in draft.end for n in step_reads(s)} | sources


def _step_buffers(step: Step) -> tuple[str, ...]:
    return (*step_reads(step), *step_writes(step), *((step.target,) if isinstance(step, CopyStep) else ()))


def _kernel_name(number: int, one: Group) -> str:
    """`k3_native_layer_norm_gelu`: the operators inside, so that profiles and sources can be read."""
    ops = [m.nest.origin.split(":")[0].split(".")[0] for m in one.members if m.nest.origin]
    seen = list(dict.fromkeys(identifier(o).strip("_") for o in ops if o))
    return f"k{number}_" + "_".join(seen[:4]) if seen else f"k{number}"
