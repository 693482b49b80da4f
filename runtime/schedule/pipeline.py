"""From a functional program to a plan: inline, fuse, order, lay out, place in memory."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from ...errors import UnsupportedError
from ..fuse.arguments import bases, exact_strides, extern_step, only_views, same_strides, stored_strides, with_gaps
from ..fuse.attention import join_products
from ..fuse.build import TILE, build_kernel, build_update
from ..fuse.folds import fold_columns
from ..fuse.groups import Group
from ..fuse.inline import inline, is_view
from ..fuse.known_first import known_first
from ..fuse.layouts import followed
from ..fuse.nests import Fuser
from ..fuse.padding import wide_rows
from ..fuse.products import Choose, fuse_products
from ..fuse.small import join_small
from ..fuse.updates import update_in_place, updated_inputs, without_copies
from ..ir.learned import learned_by
from ..ir.nodes import ITEMSIZE, Buffer, Extern, Nest, Output, Program, Size, contiguous_strides, refs
from ..ir.quote import identifier
from ..ir.work import in_any_order, is_pointwise
from ..kernels.operands import Factors
from ..kernels.plan import CopyStep, Kernel, KernelStep, Plan, Step, ViewOf
from ..kernels.steps import step_parts, step_reads, step_writes, strided_view
from ..lower.outputs import separate_outputs
from ..machine import PORTABLE, Gpu, Machine
from ..memory.arena import plan_memory
from ..memory.in_place import computed_last, write_in_place
from ..memory.order import least_memory
from ..tile.legal import made_for, refused


def schedule(
    program: Program,
    *,
    costs: Callable[[str], float] = lambda _: 1,
    fusion: bool = True,
    frugal: bool = False,
    machine: Machine = PORTABLE,
    arena: bool = True,
    out_variants: Callable[[Extern], bool] = lambda _: False,
    row_bytes: Callable[[Extern], int] = lambda _: 0,
    any_strides: Callable[[Extern], bool] = lambda _: False,
    factors: Factors = lambda _: None,
    choose: Choose | None = None,
) -> Plan:
    """Schedule a verified program.

    costs         relative cost of a scalar operation by name.
    frugal        large values have memory only while they live: slower than in an arena that stays, and less beside what training keeps.
    machine       that the plan is for: a GPU has registers where a processor has caches, and runs many programs side by side.
    arena         intermediate values share one block of memory; without, each is allocated by itself.
    out_variants  whether an extern call can write into memory that the plan gives it.
    row_bytes     at multiples of how many bytes the rows of an extern call's matrices should start, on a GPU.
    any_strides   whether an extern call takes its arguments with whatever strides; any other gets those that the program gave them.
    factors       which arguments of an extern call it multiplies, if it is a product of matrices that a kernel may compute, likewise.
    choose        which products gain by a kernel that also computes what is beside them.
    """
    program = without_copies(separate_outputs(program, only_views(program, any_strides)))
    exact = exact_strides(program.items, any_strides)
    gaps = with_gaps(program, exact)
    gpu = machine if isinstance(machine, Gpu) else None
    items, views = inline(program, costs, machine.costs.recompute, gaps)
    if fusion:
        items = known_first(items, {b.name for b in program.inputs})
    realized_views = set(views.bodies)
    # Which views must become memory: those that strides over a stored buffer cannot express. Decided after layouts; first, the groups.
    wanted = {o.buffer for o in program.outputs if o.buffer is not None} | {s for _, s in program.mutations}
    for it in items:
        if isinstance(it, Extern):
            wanted.update(r.buffer for r in refs((it.args, tuple(v for _, v in it.kwargs))))
    layouts: dict[str, Buffer] = {}
    fuser = Fuser(fusion, gpu, layouts, learned_by(items))
    for b in program.inputs:
        layouts[b.name] = Buffer(
            b.name, b.shape, b.dtype, b.stride if b.stride is not None else contiguous_strides(b.shape), b.offset
        )
    hints = _stride_hints(program, items)
    for base in bases(items, views.bodies, gaps):
        hints.setdefault(base.name, base.stride or contiguous_strides(base.shape))
    wide = wide_rows(program, items, views.bodies, row_bytes, gpu) if gpu else {}
    alike = followed(program, [it for it in items if not _is_among(it, realized_views)], hints) if gpu else {}
    as_views: dict[str, ViewOf] = {}
    inputs = {b.name for b in program.inputs}
    outputs_of: dict[str, int] = {}
    for o in program.outputs:
        if o.buffer is not None:
            outputs_of[o.buffer] = outputs_of.get(o.buffer, 0) + 1
    out_bases: set[str] = set()
    last = computed_last(program, items)
    inside = updated_inputs(program)
    moved = set(map(id, last))
    fills = _fills(program, items) if gpu else {}
    for it in [*(it for it in items if id(it) not in moved), *last]:
        if id(it) in moved and not fuser.first:
            fuser.first = len(fuser.groups)
        if isinstance(it, Nest) and it.name in realized_views:
            view = (
                strided_view(it.vars, it.shape, it.body, layouts[it.body.attr.buffer])
                if is_view(it) and it.body.op == "load"
                else None
            )
            if (
                view is not None
                and it.name in wanted
                and _as_traced(view, exact.get(it.name))
                and _may_share(it.name, view, program, inputs, outputs_of, out_bases, layouts)
            ):
                # They may differ where a size is 1.
                as_views[it.name] = replace(view, stride=exact.get(it.name, view.stride))
                continue
        if isinstance(it, Extern):
            for b in it.outs:
                stride = b.stride if b.stride is not None else contiguous_strides(b.shape)
                layouts[b.name] = Buffer(b.name, b.shape, b.dtype, wide.get(b.name, stride))
        else:
            wanted_strides = hints.get(it.name, alike.get(it.name, it.stride))
            stride = stored_strides(it.shape, wanted_strides, exact.get(it.name))
            if stride == contiguous_strides(it.shape):
                stride = wide.get(it.name, stride)
            if it.name in inside:
                stride = layouts[inside[it.name]].stride or stride
            layouts[it.name] = Buffer(it.name, it.shape, it.dtype, stride)
            if it.name in fills:
                continue
        fuser.add(it)
    tail = fuser.groups[fuser.first :] if last else []
    before = fuser.groups[: len(fuser.groups) - len(tail)]
    if gpu:
        before = fold_columns(before, as_views, gpu)
    if gpu and fusion and not fuser.learned:
        before = join_small(before, as_views, layouts, gpu.costs, outputs_of, program.mutations)
    fuser.groups = [*before, *tail]
    needed = _needed(program, fuser, as_views)
    over = {target for target, _ in program.mutations}
    steps: list[Step] = []
    counter = 0
    first = 0  # of the steps of the tail
    for group in fuser.groups:
        if tail and group is tail[0]:
            first = len(steps)
        if group.extern is not None:
            steps.append(extern_step(group.extern, as_views, layouts, out_variants, any_strides))
            continue
        mine = {m.name for m in group.members} & needed
        if not mine:
            continue
        name = _kernel_name(counter, group)
        counter += 1
        scatter = group.members[0].scatter
        if gpu and scatter is not None and in_any_order(scatter):
            steps += [KernelStep(k) for k in build_update(group, name, layouts, fills, gpu)]
            continue
        build = functools.partial(
            build_kernel, group, name, mine, layouts, costs, ITEMSIZE.__getitem__, machine, over=over
        )
        steps.append(KernelStep(_legal(build, layouts) if gpu else build()))
    outputs: list[Output | ViewOf] = []
    for o in program.outputs:
        if o.buffer is None:
            outputs.append(o)
        elif o.buffer in as_views:
            outputs.append(replace(as_views[o.buffer], paired=o.paired))
        else:
            b = layouts[o.buffer]
            assert b.stride is not None
            outputs.append(ViewOf(b.name, b.shape, b.stride, b.offset, o.paired))
    held = {o.buffer for o in outputs if o.buffer is not None}
    body, end = (steps[:first], steps[first:]) if tail else (steps, [])
    read_later = held | {n for s in end for n in step_reads(s)} | {source for _, source in program.mutations}
    if gpu and fusion:
        body = join_products(body, layouts, read_later, factors, gpu)
        if choose is not None:
            body = fuse_products(body, layouts, read_later, factors, costs, gpu.limits.mma, choose)
    if frugal:
        body = least_memory(body, layouts, read_later)
    steps, updated = update_in_place([*body, *end], program, layouts, held)
    stored = updated | write_in_place(steps, program, layouts, held, updated)
    steps += [CopyStep(target, source) for target, source in program.mutations if source not in stored]
    plan = Plan(program.inputs, steps, tuple(outputs), layouts, symbols=program.symbols, refused=tuple(fuser.refused))
    plan_memory(plan, stored, frugal=frugal, arena=arena)
    kept = (
        {n for s in steps for part in (s, *step_parts(s)) for n in _step_buffers(part)}
        | {b.name for b in program.inputs}
        | {o.buffer for o in outputs if o.buffer is not None}
    )
    plan.layouts = {n: b for n, b in layouts.items() if n in kept}
    return plan


def _legal(build: Callable[..., Kernel], layouts: dict[str, Buffer]) -> Kernel:
    """The kernel of a group as a GPU can run it: values that it can neither keep in registers nor compute again are in memory. `build` is
    `build_kernel`, which is told of these. Raises `UnsupportedError` for a kernel that cannot be.
    """
    in_memory: frozenset[str] = frozenset()
    while True:
        kernel = build(in_memory=in_memory)
        if why := refused(kernel, layouts):
            raise UnsupportedError(f"{kernel.name}: {why}")
        made = made_for(kernel, layouts)
        if not made.lost:
            return replace(kernel, apart=made.apart)
        in_memory |= {name.removeprefix(TILE) for name in made.lost}


def _fills(program: Program, items: list[Nest | Extern]) -> dict[str, Nest]:
    """Bases of indexed updates that nothing else reads and that are made of nothing: they are written where the update is."""
    read = Counter(name for it in items for name in it.reads())
    updated = {
        it.scatter.base
        for it in items
        if isinstance(it, Nest) and it.scatter is not None and in_any_order(it.scatter) and read[it.scatter.base] == 1
    }
    updated -= {o.buffer for o in program.outputs} | {source for _, source in program.mutations}
    return {
        it.name: it
        for it in items
        if isinstance(it, Nest) and it.name in updated and is_pointwise(it) and not it.reads()
    }


def _is_among(item: Nest | Extern, names: set[str]) -> bool:
    return isinstance(item, Nest) and item.name in names


def _step_buffers(step: Step) -> tuple[str, ...]:
    return (*step_reads(step), *step_writes(step), *((step.target,) if isinstance(step, CopyStep) else ()))


def _as_traced(view: ViewOf, traced: tuple[Size, ...] | None) -> bool:
    """Whether a view has the strides that an operator was traced with, where it cares."""
    return traced is None or same_strides(view.shape, view.stride, traced)


def _may_share(
    name: str,
    view: ViewOf,
    program: Program,
    inputs: set[str],
    outputs_of: dict[str, int],
    out_bases: set[str],
    layouts: dict[str, Buffer],
) -> bool:
    """An extern may read any view. An output may be a view only of memory that is its alone, with just the strides it must have."""
    if any(src == name for _, src in program.mutations):
        return False
    if name not in outputs_of:
        return True
    wanted = next(o.stride for o in program.outputs if o.buffer == name)
    base = layouts[view.buffer]
    same_size = _numel(base.shape) == _numel(view.shape)
    if (
        view.buffer in inputs
        or view.buffer in outputs_of
        or view.buffer in out_bases
        or outputs_of[name] > 1
        or not same_size
    ):
        return False
    if wanted is not None and not same_strides(view.shape, view.stride, wanted):
        return False
    if any(src == view.buffer for _, src in program.mutations):
        return False
    out_bases.add(view.buffer)
    return True


def _numel(shape: tuple[Size, ...]) -> Size:
    total: Size = 1
    for n in shape:
        total = total * n
    return total


def _stride_hints(program: Program, items: list[Nest | Extern]) -> dict[str, tuple[Size, ...]]:
    """Strides asked of a buffer from outside: outputs first, then what extern calls were traced with."""
    hints: dict[str, tuple[Size, ...]] = {}
    for it in items:
        if isinstance(it, Extern):
            for r in refs((it.args, tuple(v for _, v in it.kwargs))):
                if r.stride is not None:
                    hints.setdefault(r.buffer, r.stride)
    strides = {b.name: b.stride for b in program.inputs}
    hints.update((source, stride) for target, source in program.mutations if (stride := strides[target]) is not None)
    for o in program.outputs:
        if o.buffer is not None and o.stride is not None:
            hints[o.buffer] = o.stride
    return hints


def _needed(program: Program, fuser: Fuser, as_views: dict[str, ViewOf]) -> set[str]:
    """Buffers that must be in memory: read by another group, by an extern call, returned, or copied to an input."""
    needed: set[str] = set()
    for o in program.outputs:
        if o.buffer is not None:
            needed.add(as_views[o.buffer].buffer if o.buffer in as_views else o.buffer)
    needed.update(src for _, src in program.mutations)
    for group in reversed(fuser.groups):
        if group.extern is not None:
            for n in group.extern.reads():
                needed.add(as_views[n].buffer if n in as_views else n)
            continue
        names = {m.name for m in group.members}
        if not names & needed:
            continue
        for m in group.members:
            for n in m.nest.reads():
                if n not in names:
                    needed.add(n)
    return needed


def _kernel_name(number: int, group: Group) -> str:
    """`k3_native_layer_norm_gelu`: the operators inside, so that profiles and sources can be read."""
    ops = [m.nest.origin.split(":")[0].split(".")[0] for m in group.members if m.nest.origin]
    seen = list(dict.fromkeys(identifier(o).strip("_") for o in ops if o))
    return f"k{number}_" + "_".join(seen[:4]) if seen else f"k{number}"
