"""Inputs that are written in place: the kernel that computes their new contents stores straight into their memory.

Only where no one can tell: every read of the old contents comes first, and nothing that may still raise comes later. Small ones, such as
running statistics, are therefore computed when all else is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from ..ir.guards import checks
from ..ir.index import product
from ..ir.nodes import Buffer, Extern, Nest, Program, load, rebuild
from ..ir.work import is_pointwise
from ..kernels.plan import ExternStep, Kernel, KernelStep, Phase, Reduce, Statement, Step, Store
from ..kernels.statements import kernel_checks, statement_nodes
from ..kernels.steps import flat_index, step_reads, step_writes
from .arena import written_over


def computed_last(program: Program, items: Sequence[Nest | Extern]) -> list[Nest]:
    """New contents of inputs that are to be computed behind everything else, since something that may raise comes after them: those that
    nothing reads, made point by point of so few values that these are no more than what would be kept for a copy.
    """
    if not program.mutations:
        return []
    raising = max((k for k, it in enumerate(items) if _may_raise(it)), default=-1)
    sources = Counter(source for _, source in program.mutations)
    read = {name for it in items for name in it.reads()} | {o.buffer for o in program.outputs}
    shapes = program.shapes()
    inputs = {b.name for b in program.inputs}

    def few(nest: Nest) -> bool:
        sizes = {name: product(shapes[name].shape) for name in nest.reads()}
        own = product(nest.shape)
        known = [n for n in (own, *sizes.values()) if isinstance(n, int)]
        fresh = sum(n for name, n in sizes.items() if name not in inputs and isinstance(n, int))
        return len(known) == len(sizes) + 1 and sum(known[1:]) <= 2 * known[0] and fresh <= known[0]

    return [
        it
        for it in items[: raising + 1]
        if isinstance(it, Nest)
        and sources[it.name] == 1
        and it.name not in read
        and is_pointwise(it)
        and not _may_raise(it)
        and few(it)
    ]


def _may_raise(item: Nest | Extern) -> bool:
    return isinstance(item, Extern) or item.scatter is not None or bool(checks([item.body]))


def write_in_place(
    steps: list[Step], program: Program, layouts: dict[str, Buffer], held: Collection[str], done: Collection[str] = ()
) -> dict[str, str]:
    """For the mutations of `program` that need no copy: the buffer with the new contents → the input that it is stored into. The statements of
    their kernels in `steps` are put into an order in which each element is read before it is written. `held`: buffers that are returned.
    `done`: those that are in an input's memory already.
    """
    writer = {name: k for k, step in enumerate(steps) for name in step_writes(step)}
    last_read = {name: k for k, step in enumerate(steps) for name in step_reads(step)}
    # An indexed update writes what the copy before it has filled, perhaps at one place from several points: each must read the old contents.
    updated = {name for name, n in Counter(name for step in steps for name in step_writes(step)).items() if n > 1}
    # A kernel that checks positions, and an eager kernel, may raise: by then no input has been changed.
    raises = max((k for k, s in enumerate(steps) if not isinstance(s, KernelStep) or _checks(s)), default=-1)
    # A call that writes into its arguments comes after what it follows in the program, also if that writes an input.
    raises_first = max(
        (k for k, s in enumerate(steps) if not _writes(s) and (isinstance(s, ExternStep) or _checks(s))), default=-1
    )
    found: dict[str, str] = {}
    for target, source in program.mutations:
        k = writer.get(source, -1)
        if source in done:
            continue
        if k >= 0 and _writes(steps[k]):
            chain = _written_one_after_another(steps, target, source, writer, layouts)
            read = {name: last_read.get(name, -1) for name in (target, *chain[:-1])}
            after = [writer[name] for name in chain]
            if chain and after[0] > raises_first and list(read.values()) == after and not {*chain} & {*held}:
                found |= dict.fromkeys(chain, target)
            continue
        if (
            k <= raises
            or source in updated
            or source in held
            or last_read.get(target, -1) > k
            or not _same(layouts[target], layouts[source])
        ):
            continue
        step = steps[k]
        assert isinstance(step, KernelStep)
        if step.kernel.parts or (target, source) in step.kernel.no_alias:
            continue
        ordered = _ordered(step.kernel, {**found, source: target}, layouts)
        if ordered is not None:
            steps[k] = KernelStep(ordered)
            found[source] = target
    return found


def _checks(step: Step) -> bool:
    return isinstance(step, KernelStep) and bool(kernel_checks(step.kernel))


def _writes(step: Step) -> bool:
    return isinstance(step, ExternStep) and step.call.writes > 0


def _written_one_after_another(
    steps: Sequence[Step], target: str, source: str, writer: dict[str, int], layouts: dict[str, Buffer]
) -> list[str]:
    """What calls that write into their arguments make of the input `target`, up to `source`; nothing if that is made of something else."""
    chain = [source]
    while _writes(steps[k := writer.get(chain[0], -1)]) and k >= 0:
        before = written_over(steps[k], chain[0], layouts)
        if not before:
            return []
        if before[0] == target:
            return chain
        chain.insert(0, before[0])
    return []


def _same(a: Buffer, b: Buffer) -> bool:
    return (a.dtype, a.shape, a.stride, a.offset) == (b.dtype, b.shape, b.stride, b.offset)


def _ordered(kernel: Kernel, stored: dict[str, str], layouts: dict[str, Buffer]) -> Kernel | None:
    """The kernel with its statements in such an order, or None where none will do."""
    phases = list(kernel.phases)
    for source, target in stored.items():
        at = [(p, s) for p, phase in enumerate(phases) for s in phase.body if _buffer(s) == source]
        if not at:
            continue
        p, store = at[0]
        if len(at) > 1 or type(store) is not Store or store.mode != "set" or store.mask is not None:
            return None
        where = flat_index(store.index, layouts[source])
        for q, phase in enumerate(phases):
            reads = [index for s in phase.body for index in _reads(s, target)]
            if (reads and q > p) or any(flat_index(i, layouts[target]) is not where for i in reads):
                return None
    for p, phase in enumerate(phases):
        body = _sorted(phase.body, stored) or _sorted(_from_memory(phase.body, stored), stored)
        if body is None:
            return None
        phases[p] = Phase(phase.inner, body)
    return replace(kernel, phases=tuple(phases))


def _sorted(body: Sequence[Statement], stored: dict[str, str]) -> tuple[Statement, ...] | None:
    """Each statement after those whose results it reads, and before those that store over what it reads; None: there is no such order."""
    graph: dict[int, set[int]] = {k: set() for k in range(len(body))}
    reads = [{ld.attr.buffer for node in statement_nodes(s) for ld in node.loads()} for s in body]
    for k, s in enumerate(body):
        name = _buffer(s)
        target = stored.get(name) if name is not None else None
        for j, read in enumerate(reads):
            if j != k and target is not None and target in read:
                graph[k].add(j)
            if j != k and name is not None and name in read:
                graph[j].add(k)
    try:
        return tuple(body[k] for k in TopologicalSorter(graph).static_order())
    except CycleError:
        return None


def _from_memory(body: Sequence[Statement], stored: dict[str, str]) -> list[Statement]:
    """The statements, reading a value that another stores in place from where it is stored: they need the old contents no more."""
    out = list(body)
    for k, s in enumerate(body):
        if not isinstance(s, Store) or s.buffer not in stored or s.value.op in ("load", "const"):
            continue
        there = load(s.buffer, s.index, s.value.dtype)
        for j, other in enumerate(out):
            if j != k and s.value in set(other.value.walk()):
                out[j] = replace(other, value=rebuild(other.value, lambda _: None, {}, {s.value: there}))
    return out


def _buffer(s: Statement) -> str | None:
    return None if isinstance(s, Reduce) else s.buffer


def _reads(s: Statement, buffer: str) -> list[tuple]:
    return [ld.attr.index for node in statement_nodes(s) for ld in node.loads() if ld.attr.buffer == buffer]
