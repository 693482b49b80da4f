"""Turn a group of nests into a kernel: phases, what is stored, what passes in a register, a scratch tile or by recomputation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from ..ir.index import Expr, Sym, Var, expr, of, product
from ..ir.nodes import Buffer, Nest, Node, identity_mapping, load, rebuild, walk_all
from ..ir.work import node_cost
from ..kernels.access import in_loop_order
from ..kernels.plan import REDUCED, Accumulate, Kernel, Phase, Reduce, Scan, Statement, Store
from ..kernels.statements import statement_nodes
from ..machine import Gpu, Machine
from .groups import Group, Member

TILE = "tile_"
"""Begins the names of scratch tiles, before that of the value."""


def build_kernel(
    group: Group,
    name: str,
    needed: set[str],
    layouts: dict[str, Buffer],
    costs: Callable[[str], float],
    itemsize: Callable[[str], int],
    machine: Machine,
    *,
    over: Collection[str] = (),
    in_memory: frozenset[str] = frozenset(),
) -> Kernel:
    """The kernel of a group.

    needed     buffers of the group that something outside reads. Values that only the group reads get no memory of their own, but for
    in_memory  some of them.
    machine    that the kernel is for: on a GPU a scratch tile is in registers, or computed again where it is read.
    over       buffers that a kernel may store over (inputs that are written).
    """
    made = _Phases(group, needed, costs, itemsize, machine, in_memory)
    phases = made.phases()
    if isinstance(machine, Gpu) and (dear := _dear(phases, made.scratch, {*over}, costs, machine)):
        more = in_memory | {n.removeprefix(TILE) for n in dear}
        return build_kernel(group, name, needed, layouts, costs, itemsize, machine, over=over, in_memory=more)
    return _finish(group, name, phases, made.scratch, layouts, machine)


class _Phases:
    """The phases of a group's kernel.

    level    of each value, the number of phases that must come before it.
    stored   values that later phases read back, or that something outside reads; `tiles`: those of them in a scratch tile, with its loops.
    """

    def __init__(
        self,
        group: Group,
        needed: set[str],
        costs: Callable[[str], float],
        itemsize: Callable[[str], int],
        machine: Machine,
        in_memory: frozenset[str],
    ) -> None:
        self.group, self.needed, self.costs, self.machine = group, needed, costs, machine
        self.members = group.names()
        self.level: dict[str, int] = {}
        for m in group.members:
            self.level[m.name] = _level(m, self.members, self.level)
        kept = self._kept()
        self.stored = needed | kept
        self.scratch: list[Buffer] = []
        self.tiles: dict[str, tuple[Var, ...]] = {}
        for m in group.members:
            if m.name in kept and m.name not in needed and m.name not in in_memory and self._fits(m, itemsize):
                self.scratch.append(Buffer(f"{TILE}{m.name}", tuple(v.extent for v in m.inner), m.nest.dtype))
                self.tiles[m.name] = m.inner
        self.resolved: dict[tuple[str, int], Node] = {}

    def _kept(self) -> set[str]:
        """Values that later phases must be able to read back."""
        found: set[str] = set()
        for m in self.group.members:
            for ld in _loads(m):
                p = self.members.get(ld.attr.buffer)
                if p is None or p.reduces:
                    continue
                elsewhere = p.nest.scan is not None or not _same_point(p, ld)
                later = p.inner and self.level[p.name] < self.level[m.name]
                if elsewhere or (later and (p.name in self.needed or _expensive(p, self.costs, self.machine))):
                    found.add(p.name)
        return found

    def _fits(self, m: Member, itemsize: Callable[[str], int]) -> bool:
        """Whether a value can be in a scratch tile over its inner loops."""
        most = self.machine.budgets.scratch
        points = product(v.extent for v in m.inner)
        if m.scatter is not None or not isinstance(points, int) or points * itemsize(m.nest.dtype) > most:
            return False
        loops = {v for e in m.index for v in e.atoms()}
        return loops <= {*m.inner, *self.group.outer} and all(_digit(m, v, m.index) is not None for v in m.inner)

    def phases(self) -> tuple[Phase, ...]:
        slots: dict[tuple[int, tuple[Var, ...]], list[Statement]] = {}
        for m in self.group.members:
            if m.scatter is not None:
                _add_scatter(slots, m)
                continue
            for level, inner, statement in self._statements(m):
                slots.setdefault((level, inner), []).append(statement)
        order = sorted(slots, key=lambda k: (k[0], [v.text for v in k[1]]))
        return tuple(Phase(inner, tuple(slots[level, inner])) for level, inner in order)

    def _statements(self, m: Member) -> Iterator[tuple[int, tuple[Var, ...], Statement]]:
        """What computes a value, with level and loops."""
        level = self.level[m.name]
        tile = m.name in self.tiles
        target, index = (f"{TILE}{m.name}", tuple(of(v) for v in m.inner)) if tile else (m.name, m.index)
        if m.reduces:
            yield level, m.inner, Reduce(f"{REDUCED}{m.name}", str(m.nest.reduce), self._body(m, m), m.nest.dtype)
            if m.name in self.stored:
                yield level + 1, (), Store(m.name, m.index, load(f"{REDUCED}{m.name}", (), m.nest.dtype))
        elif m.accumulates:
            yield level, m.inner, Accumulate(m.name, m.index, self._body(m, m), kind=str(m.nest.reduce))
        elif m.nest.scan is not None:
            yield level, m.inner, Scan(target, index, m.nest.scan, self._body(m, m))
        elif m.name in self.stored:
            yield level, m.inner, Store(target, index, self._body(m, m))

    def _body(self, p: Member, reader: Member) -> Node:
        """The body of `p` as evaluated in the phase of `reader`."""
        key = p.name, self.level[reader.name]
        if key not in self.resolved:
            self.resolved[key] = rebuild(p.body, functools.partial(self._read, reader), {})
        return self.resolved[key]

    def _read(self, reader: Member, ld: Node) -> Node | None:
        """What replaces a load in the phase of `reader`: a register, an element of a tile, or the value computed there; None: it stays a load."""
        p = self.members.get(ld.attr.buffer)
        if p is None:
            return None
        if p.reduces:
            return load(f"{REDUCED}{p.name}", (), ld.dtype)
        later = p.inner and self.level[p.name] < self.level[reader.name]
        if p.name not in self.stored or not (later or not _same_point(p, ld) or p.nest.scan is not None):
            return self._body(p, reader)
        if p.name in self.tiles:
            return load(f"{TILE}{p.name}", _tile_index(p, ld), ld.dtype, ld.args[0] if ld.args else None)
        return None


def _dear(
    phases: tuple[Phase, ...], scratch: list[Buffer], over: set[str], costs: Callable[[str], float], gpu: Gpu
) -> set[str]:
    """Tiles that are read at other points and had better be in memory: values made of one another would be computed again in chains, each link at
    all points that the next one reads.
    """
    others = _read_elsewhere(phases, scratch) if scratch else set()
    if not others:
        return set()
    found = {st.buffer: st for phase in phases for st in phase.body if not isinstance(st, Reduce)}
    unsafe = {*over, *found}
    return {t for t in others if not _can_be_made_again(found[t], unsafe, costs, gpu)}


def _read_elsewhere(phases: tuple[Phase, ...], scratch: list[Buffer]) -> set[str]:
    """Tiles that a phase reads at other points than those at which it stores."""
    tiles = {b.name: b for b in scratch}
    return {
        ld.attr.buffer
        for phase in phases
        if any(not isinstance(st, Reduce) and st.buffer not in tiles for st in phase.body)
        for st in phase.body
        for node in statement_nodes(st)
        for ld in node.loads()
        if (tile := tiles.get(ld.attr.buffer)) is not None and not in_loop_order(ld.attr.index, tile.shape, phase.inner)
    }


def _can_be_made_again(st: Store | Scan, unsafe: Collection[str], costs: Callable[[str], float], gpu: Gpu) -> bool:
    """Whether what a tile holds can be computed at other points, at less than memory would cost, of nothing that may be stored over meanwhile."""
    plain = type(st) is Store and st.mode == "set" and st.mask is None
    made_of = {ld.attr.buffer for node in statement_nodes(st) for ld in node.loads()}
    return plain and made_of.isdisjoint(unsafe) and _cost_of_each(st, costs) <= gpu.costs.elsewhere


def _cost_of_each(st: Store | Scan, costs: Callable[[str], float]) -> float:
    """Arithmetic for each point of a tile, without that which is done once for all of them."""
    loops = {a for e in st.index for a in e.atoms()}
    counted = (n for n in walk_all([st.value]) if n.op not in ("const", "index", "bounded") and n.vars() & loops)
    return sum(1 if n.op == "load" else costs(n.op) for n in counted)


def build_update(
    group: Group, name: str, layouts: dict[str, Buffer], fills: Mapping[str, Nest], gpu: Gpu
) -> tuple[Kernel, Kernel]:
    """An indexed update whose order does not matter as two kernels of independent points: the copy of the base (or the base itself, where
    it is one of `fills`), then atomic updates.
    """
    slots: dict[tuple[int, tuple[Var, ...]], list[Statement]] = {}
    (m,) = group.members
    _add_scatter(slots, m)
    assert m.scatter is not None
    if (fill := fills.get(m.scatter.base)) is not None:
        first, (start,) = next(iter(slots.items()))
        assert isinstance(start, Store)
        value = rebuild(fill.body, lambda _: None, identity_mapping(fill.vars, start.index))
        slots[first] = [replace(start, value=value)]
    copy, update = (
        _finish(
            replace(group, outer=inner), f"{name}{suffix}", (Phase((), tuple(body)),), [], layouts, gpu, serial=False
        )
        for ((_, inner), body), suffix in zip(slots.items(), ("_base", ""), strict=True)
    )
    return copy, update


def kernel_of(
    name: str, outer: tuple[Var, ...], body: tuple[Statement, ...], layouts: dict[str, Buffer], of_: Kernel
) -> Kernel:
    """A kernel of independent points that computes a part of what the kernel `of_` would."""
    group = Group(0, outer)
    made = _finish(group, name, (Phase((), body),), [], layouts, of_.machine, serial=False)
    return replace(made, defines=of_.defines, origins=of_.origins)


def _finish(
    group: Group,
    name: str,
    phases: tuple[Phase, ...],
    scratch: list[Buffer],
    layouts: dict[str, Buffer],
    machine: Machine,
    serial: bool = True,
) -> Kernel:
    local = {b.name for b in scratch}
    writes: dict[str, None] = {}
    reads: dict[str, None] = {}
    for phase in phases:
        for st in phase.body:
            for node in statement_nodes(st):
                for ld in node.loads():
                    b = ld.attr.buffer
                    if b not in local and not b.startswith(REDUCED):
                        reads.setdefault(b)
            if not isinstance(st, Reduce) and st.buffer not in local:
                writes.setdefault(st.buffer)
    origins = tuple(dict.fromkeys(m.nest.origin for m in group.members if m.nest.origin))
    serial = serial and any(isinstance(s, Store) and s.atomic for p in phases for s in p.body)
    return Kernel(
        name,
        group.outer,
        phases,
        tuple(r for r in reads if r not in writes),
        tuple(writes),
        tuple(scratch),
        tuple(m.name for m in group.members),
        origins,
        serial,
        tuple(sorted(_symbols(group.outer, phases, [layouts[b] for b in (*reads, *writes) if b in layouts]))),
        group.grid_loop,
        machine=machine,
    )


def _symbols(outer: tuple[Var, ...], phases: tuple[Phase, ...], layouts: list[Buffer]) -> set[str]:
    """Size symbols that the loops, the coordinates or the strides mention."""
    exprs: list[Expr] = []
    for v in (*outer, *(v for p in phases for v in p.inner)):
        exprs += [v.extent] if isinstance(v.extent, Expr) else []
    for b in layouts:
        exprs += [n for n in (*(b.stride or ()), *b.shape, b.offset) if isinstance(n, Expr)]
    for p in phases:
        for st in p.body:
            exprs += [] if isinstance(st, Reduce) else list(st.index)
    for n in walk_all(root for p in phases for st in p.body for root in statement_nodes(st)):
        exprs += list(n.attr.index) if n.op == "load" else [n.attr] if n.op == "index" else []
    return {a.name for e in exprs for a in e.atoms() if isinstance(a, Sym)}


def _loads(m: Member) -> tuple[Node, ...]:
    return m.body.loads()


def _same_point(p: Member, ld: Node) -> bool:
    """The load reads the element that `p` defines at the very same loop point."""
    return ld.attr.index == p.index


def _level(m: Member, members: dict[str, Member], level: dict[str, int]) -> int:
    found = 0
    for ld in _loads(m):
        p = members.get(ld.attr.buffer)
        if p is None:
            continue
        after = p.reduces or p.nest.scan is not None or not _same_point(p, ld) or (p.inner and p.inner != m.inner)
        found = max(found, level[p.name] + (1 if after else 0))
    return found


def _expensive(p: Member, costs: Callable[[str], float], machine: Machine) -> bool:
    most = machine.costs.in_phase
    return node_cost(p.body, costs, most) > most


def _tile_index(p: Member, ld: Node) -> tuple[Expr, ...]:
    """Coordinates inside the scratch tile of `p` for a load of its logical element."""
    if _same_point(p, ld):
        return tuple(of(v) for v in p.inner)
    return tuple(e for v in p.inner if (e := _digit(p, v, ld.attr.index)) is not None)


def _digit(p: Member, v: Var, index: tuple[Expr, ...]) -> Expr | None:
    """The loop variable `v` at the element `index` of what `p` defines, if it is a digit of one of the coordinates."""
    for place, e in zip(p.index, index, strict=True):
        if place.var is v:
            return e
        steps = [(c, u) for u in place.atoms() if isinstance(u, Var) and (c := place.coefficient(u)) is not None]
        if not all(c.is_const and isinstance(u.extent, int) for c, u in steps) or v not in (u for _, u in steps):
            continue
        digits = sorted(((int(c), int(u.extent), u) for c, u in steps), key=lambda d: d[:2])  # type: ignore[arg-type]
        radix = all(b[0] == a[0] * a[1] for a, b in itertools.pairwise(digits)) and digits[0][0] == 1
        whole = sum((of(u) * c for c, _, u in digits), start=expr(0))
        if radix and whole == place:
            step = next(c for c, _, u in digits if u is v)
            return e // step if v is digits[-1][2] else e // step % v.extent
    return None


def _add_scatter(slots: dict[tuple[int, tuple[Var, ...]], list[Statement]], m: Member) -> None:
    """First the copy of the base, then the indexed updates, in order."""
    assert m.scatter is not None
    copy_vars = tuple(v for e in m.index if (v := e.var) is not None)
    slots.setdefault((0, copy_vars), []).append(Store(m.name, m.index, load(m.scatter.base, m.index, m.nest.dtype)))
    slots.setdefault((1, m.inner), []).append(
        Store(m.name, m.scatter.index, m.body, m.scatter.mode, m.scatter.mask, True)
    )
