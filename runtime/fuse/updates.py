"""Indexed updates of inputs that run in the input's own memory: without the copy of the input that the program speaks of, and without the one back.

A step of a decoder writes one position of a cache of thousands. Nobody may be able to tell the difference: nothing reads the old contents after
the update, and whatever the program does before the update and may raise an error is done before. Positions are checked before anything is
written, by a kernel of its own where the update itself would only find out half-way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ..ir.guards import checks
from ..ir.index import Expr, Var, of
from ..ir.nodes import (
    Buffer,
    Extern,
    Nest,
    Node,
    Program,
    contiguous_strides,
    index_node,
    indirect,
    load,
    rebuild,
    walk_all,
)
from ..ir.work import is_pointwise
from ..kernels.plan import ExternStep, Kernel, KernelStep, Phase, Step, Store
from ..kernels.statements import kernel_checks, statement_nodes
from ..kernels.steps import step_reads, step_writes
from .build import kernel_of

_Update = tuple[int, Kernel, list[int]]
"""The step of an update, its kernel without the copy, and the steps that only copy."""
Key = tuple[Node, tuple[Var, ...]]
"""A check, whatever its error says, and the loops that it is made in."""


def updated_inputs(program: Program) -> dict[str, str]:
    """The indexed updates that make the new contents of an input, one after another, with that input: the buffers that may be in its memory."""
    nests = {it.name: it for it in program.items if isinstance(it, Nest) and it.scatter is not None}
    sources = Counter(source for _, source in program.mutations)
    sources.update(o.buffer for o in program.outputs if o.buffer is not None)
    found: dict[str, str] = {}
    for target, source in program.mutations:
        chain, name = [], source
        while name in nests:
            chain.append(name)
            name = nests[name].scatter.base  # type: ignore[union-attr]
        if name == target and chain and not any(sources[n] > (n == source) for n in (target, *chain)):
            found |= dict.fromkeys(reversed(chain), target)
    return found


def without_copies(program: Program) -> Program:
    """The program with new contents of inputs that are a copy of an indexed update (for its layout) taken from the update itself."""
    nests = {it.name: it for it in program.items if isinstance(it, Nest)}

    def origin(name: str) -> str:
        start = name
        while (nest := nests.get(name)) is not None and nest.scatter is None:
            if not is_pointwise(nest) or nest.body.op != "load" or not _is_whole(nest):
                break
            name = nest.body.attr.buffer
        return name if name in nests and nests[name].scatter is not None else start

    mutations = tuple((target, origin(source)) for target, source in program.mutations)
    sources = Counter(source for _, source in mutations)
    kept = (
        (t, new if sources[new] == 1 else old) for (t, old), (_, new) in zip(program.mutations, mutations, strict=True)
    )
    return replace(program, mutations=tuple(kept))


def _is_whole(nest: Nest) -> bool:
    """Whether a nest of one load is another buffer as it is."""
    return nest.body is load(nest.body.attr.buffer, nest.vars, nest.dtype)


def update_in_place(
    steps: Sequence[Step], program: Program, layouts: dict[str, Buffer], held: Collection[str]
) -> tuple[list[Step], dict[str, str]]:
    """The steps with the updates of inputs in place, and which buffers are therefore in the memory of which input. `layouts` gets those of
    checked positions. `held`: buffers that are returned.
    """
    chains: dict[str, list[str]] = {}
    for name, target in updated_inputs(program).items():
        chains.setdefault(target, []).append(name)
    if not chains:
        return list(steps), {}
    seen = _Steps(steps, program)
    stored: dict[str, str] = {}
    found: list[_Update] = []
    for target, chain in chains.items():
        updates = [seen.update(old, name, layouts) for old, name in zip((target, *chain), chain, strict=False)]
        if None in updates or {*chain} & {*held}:
            continue
        stored |= dict.fromkeys(chain, target)
        found += filter(None, updates)
    instead: dict[int, Kernel | None] = {}
    first: dict[int, list[Step]] = {}
    known: dict[Key, Node] = {}
    for k, kernel, copies in sorted(found, key=lambda update: update[0]):
        kernel, before = _checked_first(kernel, layouts, known)
        instead |= {**dict.fromkeys(copies), k: kernel}
        for check in before:
            first.setdefault(seen.earliest(check), []).append(KernelStep(check))
    out: list[Step] = []
    for k, step in enumerate(steps):
        out += first.get(k, ())
        kept = instead.get(k, step)
        if kept is not None:
            out.append(KernelStep(kept) if isinstance(kept, Kernel) else kept)
    return out, stored


class _Steps:
    """The steps of a plan: who writes and reads what, and which items of the program may raise in which step."""

    def __init__(self, steps: Sequence[Step], program: Program) -> None:
        self.steps = steps
        self.writers: dict[str, list[int]] = {}
        self.readers: dict[str, list[int]] = {}
        for k, step in enumerate(steps):
            for name in step_writes(step):
                self.writers.setdefault(name, []).append(k)
            for name in step_reads(step):
                self.readers.setdefault(name, []).append(k)
        self.nests = {it.name: it for it in program.items if isinstance(it, Nest)}
        self.place = {
            name: k
            for k, it in enumerate(program.items)
            for name in ([it.name] if isinstance(it, Nest) else [b.name for b in it.outs])
        }
        self.calls: list[tuple[Extern, int]] = [(it, k) for k, it in enumerate(program.items) if isinstance(it, Extern)]

    def update(self, old: str, name: str, layouts: Mapping[str, Buffer]) -> _Update | None:
        """The step that computes `name` from `old`, its kernel without the copy, and the steps that only copy; None: it must copy."""
        a, b = layouts[old], layouts[name]
        if (a.dtype, a.shape, a.stride, a.offset) != (b.dtype, b.shape, b.stride, b.offset):
            return None
        *copies, k = self.writers.get(name, [-1])
        kernel = _without_copy(self.steps, copies, k, old, name)
        reads = [j for j in self.readers.get(old, ()) if j not in (k, *copies)]
        if kernel is None or any(j > k for j in reads) or {old, name} & {*kernel.reads}:
            return None
        here = self.place[name]
        late = (j for j in range(k + 1, len(self.steps)) for place in self.raising(j) if place < here)
        return None if any(True for _ in late) else (k, kernel, copies)

    def raising(self, k: int) -> Iterator[int]:
        """The places in the program of what may raise when a step runs."""
        step = self.steps[k]
        if isinstance(step, ExternStep):
            yield from (at for call, at in self.calls if call is step.call)
        elif isinstance(step, KernelStep) and kernel_checks(step.kernel):
            left, seen = [*step.kernel.defines], set()
            while left:
                name = left.pop()
                if name in self.nests and name not in seen:
                    seen.add(name)
                    if checks(_values(self.nests[name])):
                        yield self.place[name]
                    left += [n for n in self.nests[name].reads() if n not in self.writers]
        elif isinstance(step, KernelStep):
            yield from (at for part in step.kernel.parts if isinstance(part, ExternStep) for at in self._of(part))

    def _of(self, step: ExternStep) -> list[int]:
        return [at for call, at in self.calls if call is step.call]

    def earliest(self, kernel: Kernel) -> int:
        """The first step that a kernel may run before: all that it reads is there, and effects keep their order."""
        made = [k for name in kernel.reads for k in self.writers.get(name, ())]
        effects = [k for k, s in enumerate(self.steps) if isinstance(s, ExternStep) and s.call.effect]
        here = min(k for k in self.writers[kernel.defines[0]])
        return max((k + 1 for k in (*made, *effects) if k < here), default=0)


def _values(nest: Nest) -> list[Node]:
    """All that a nest computes: its value, and of an indexed update positions and condition."""
    scatter = nest.scatter
    if scatter is None:
        return [nest.body]
    places = [index_node(e) for e in scatter.index if not e.is_const and e.var is None]
    return [nest.body, *places, *([] if scatter.mask is None else [scatter.mask])]


def _without_copy(steps: Sequence[Step], copies: Sequence[int], k: int, old: str, name: str) -> Kernel | None:
    """The kernel of step `k` without the copy of `old`, if the steps do nothing but that copy and the update."""
    step = steps[k]
    if k < 0 or not isinstance(step, KernelStep) or len(copies) > 1:
        return None
    if copies:
        before = steps[copies[0]]
        if not isinstance(before, KernelStep) or len(before.kernel.phases) != 1:
            return None
        head, rest = before.kernel.phases[0].body, step.kernel.phases
    else:
        head, rest = step.kernel.phases[0].body, step.kernel.phases[1:]
    body = [st for phase in rest for st in phase.body]
    if len(head) != 1 or len(body) != 1 or not _is_copy(head[0], old, name) or not _is_update(body[0], name):
        return None
    return replace(step.kernel, phases=rest, reads=tuple(_reads(rest)))


def _is_copy(st: object, old: str, name: str) -> bool:
    whole = isinstance(st, Store) and st.mode == "set" and st.mask is None and st.buffer == name
    return whole and st.value.op == "load" and not st.value.args and st.value.attr.buffer == old  # type: ignore[attr-defined]


def _is_update(st: object, name: str) -> bool:
    return isinstance(st, Store) and st.atomic and st.buffer == name


def _reads(phases: Sequence[Phase]) -> dict[str, None]:
    roots = [node for phase in phases for st in phase.body for node in statement_nodes(st)]
    return {n.attr.buffer: None for n in walk_all(roots) if n.op == "load"}


def _checked_first(kernel: Kernel, layouts: dict[str, Buffer], known: dict[Key, Node]) -> tuple[Kernel, list[Kernel]]:
    """The kernel of an update with all positions read from memory that kernels before it fill, which check them. `known`: positions that are
    there already, since an update before had the same (the caches of all layers of a decoder).
    """
    (phase,) = (p for p in kernel.phases if p.body)
    (st,) = phase.body
    assert isinstance(st, Store)
    checked: dict[Node, Node] = {}
    before: list[Kernel] = []
    for n in _outermost_checks(statement_nodes(st)):
        loops = tuple(v for v in (*kernel.outer, *phase.inner) if v in n.vars())
        key = Node(n.op, n.args, n.dtype), loops
        if key not in known:
            name, shape = f"{st.buffer}_position{len(before)}", tuple(v.extent for v in loops)
            layouts[name] = Buffer(name, shape, n.dtype, contiguous_strides(shape))
            at = tuple(of(v) for v in loops)
            known[key] = load(name, at, n.dtype)
            body = (Store(name, at, n),)
            before.append(kernel_of(f"{kernel.name}_position{len(before)}", loops, body, layouts, kernel))
        checked[n] = known[key]
    if not checked:
        return kernel, []

    def changed(node: Node) -> Node:
        return rebuild(node, lambda _: None, {}, dict(checked))

    def moved(e: Expr) -> Expr:
        return e.subst({}, lambda v: indirect(changed(v.node), v.lo, v.hi))

    mask = None if st.mask is None else changed(st.mask)
    new = replace(st, index=tuple(map(moved, st.index)), value=changed(st.value), mask=mask)
    phases = tuple(replace(p, body=(new,)) if p is phase else p for p in kernel.phases)
    return replace(kernel, phases=phases, reads=tuple(_reads(phases))), before


def _outermost_checks(roots: Sequence[Node]) -> list[Node]:
    """The checks that are not a part of another one."""
    found: dict[Node, None] = {}
    left, seen = [*roots], set()
    while left:
        n = left.pop()
        if n in seen:
            continue
        seen.add(n)
        if n.op == "bounded":
            found[n] = None
        else:
            left += n.children()
    inside = {m for n in found for c in n.children() for m in c.walk() if m.op == "bounded"}
    return [n for n in found if n not in inside]


__all__ = ["update_in_place", "updated_inputs"]
