"""Scratch tiles have no memory on a GPU: each is either a value that stays in registers, or computed again where it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..ir.guards import masked
from ..ir.index import Atom, Expr, Val, Var, of
from ..ir.nodes import Buffer, Node, Size, indirect, rebuild
from ..kernels.access import in_loop_order
from ..kernels.plan import REDUCED, Kernel, Phase, Reduce, Scan, Statement, Store


@dataclass(frozen=True)
class _Tile:
    buffer: Buffer
    phase: int
    inner: tuple[Var, ...]
    store: Store | Scan


def roots(st: Statement) -> list[Node]:
    """Every scalar expression of a statement, also those inside its store index."""
    found = [st.value]
    if isinstance(st, Store) and st.mask is not None:
        found.append(st.mask)
    if not isinstance(st, Reduce):
        found += [a.node for e in st.index for a in sorted(e.atoms(), key=lambda a: a.text) if isinstance(a, Val)]
    return found


def changed(st: Statement, mapping: Mapping[Atom, int | Expr], leaf: Callable[[Node], Node | None]) -> Statement:
    """The statement over other loop variables, and with loads replaced."""
    memo: dict[Node, Node] = {}

    def node(n: Node) -> Node:
        return rebuild(n, leaf, mapping, memo)

    if isinstance(st, Reduce):
        return replace(st, value=node(st.value))
    index = tuple(e.subst(mapping, lambda v: indirect(node(v.node), v.lo, v.hi)) for e in st.index)
    if isinstance(st, Scan):
        return replace(st, value=node(st.value), index=index)
    return replace(st, value=node(st.value), index=index, mask=None if st.mask is None else node(st.mask))


def over_groups(kernel: Kernel) -> list[tuple[int, tuple[Var, ...], tuple[Statement, ...]]]:
    """For each phase a number for its loops, their variables, and its statements over those. Phases over equal loops share their variables, and with
    them the values that a persistent kernel keeps.
    """
    groups: dict[tuple[Size, ...], int] = {}
    found: list[tuple[int, tuple[Var, ...], tuple[Statement, ...]]] = []
    for phase in kernel.phases:
        extents = tuple(v.extent for v in phase.inner if v.extent != 1)
        group = groups.setdefault(extents, len(groups))
        loops = tuple(Var(f"r{group}_{k}", n) for k, n in enumerate(extents))
        live = iter(loops)
        mapping: dict[Atom, int | Expr] = {v: of(next(live)) if v.extent != 1 else 0 for v in phase.inner}
        found.append((group, loops, tuple(changed(st, mapping, lambda _: None) for st in phase.body)))
    return found


@dataclass(frozen=True)
class Rematerialized:
    """A kernel without the tiles that cannot stay in registers.

    spilled   tiles that can neither stay nor be computed again, and why: their values must be in memory.
    no_alias  (read, written): buffers that must not share memory, since one is stored over before a tile is computed again of the other.
    """

    kernel: Kernel
    spilled: Mapping[str, str]
    no_alias: frozenset[tuple[str, str]]


def rematerialized(kernel: Kernel, persistent: bool) -> Rematerialized:
    """The kernel with only those tiles left that can stay in registers: written and read in the order of equal loops, in one tile."""
    if not kernel.scratch:
        return Rematerialized(kernel, {}, frozenset())
    return _Rematerializer(kernel, persistent).run()


def _loads(st: Statement) -> Iterator[Node]:
    return (ld for root in roots(st) for ld in root.loads())


def _in_order(kernel: Kernel, t: _Tile) -> bool:
    if not in_loop_order(t.store.index, t.buffer.shape, t.inner):
        return False
    extents = _extents(t.inner)
    for phase in kernel.phases:
        for ld in (ld for st in phase.body for ld in _loads(st) if ld.attr.buffer == t.buffer.name):
            if _extents(phase.inner) != extents or not in_loop_order(ld.attr.index, t.buffer.shape, phase.inner):
                return False
    return True


def _extents(loops: tuple[Var, ...]) -> tuple[Size, ...]:
    return tuple(v.extent for v in loops if v.extent != 1)


class _Rematerializer:
    def __init__(self, kernel: Kernel, persistent: bool) -> None:
        self.kernel = kernel
        shapes = {b.name: b for b in kernel.scratch}
        self.tiles = {
            st.buffer: _Tile(shapes[st.buffer], p, phase.inner, st)
            for p, phase in enumerate(kernel.phases)
            for st in phase.body
            if not isinstance(st, Reduce) and st.buffer in shapes
        }
        self.keep = {name for name, t in self.tiles.items() if persistent and _in_order(kernel, t)}
        self.stored: list[set[str]] = []  # global memory that the phases before write
        self.permuted: set[str] = set()  # tiles that are made of others at other points than their own
        self.spilled: dict[str, str] = {}
        self.no_alias: set[tuple[str, str]] = set()

    def run(self) -> Rematerialized:
        made = {name: {ld.attr.buffer for ld in _loads(t.store)} for name, t in self.tiles.items()}
        while gone := {b for name in made if name not in self.keep for b in made[name]} & self.keep:
            self.keep -= gone  # they are read at the points at which those are computed again
        phases: list[Phase] = []
        so_far: set[str] = set()
        for p, phase in enumerate(self.kernel.phases):
            self.stored.append(set(so_far))
            body: list[Statement] = []
            for st in phase.body:
                if not isinstance(st, Reduce) and st.buffer in self.tiles and st.buffer not in self.keep:
                    # What it holds must be known in terms of what is left.
                    new = changed(st, {}, self._reader(p, st.buffer))
                    assert not isinstance(new, Reduce)
                    self.tiles[st.buffer] = replace(self.tiles[st.buffer], store=new)
                    continue
                body.append(changed(st, {}, self._reader(p)))
                if not isinstance(st, Reduce) and st.buffer not in self.tiles:
                    so_far.add(st.buffer)
            phases.append(Phase(phase.inner, tuple(body)))
        scratch = tuple(b for b in self.kernel.scratch if b.name in self.keep)
        kernel = replace(self.kernel, phases=tuple(phases), scratch=scratch)
        return Rematerialized(kernel, self.spilled, frozenset(self.no_alias))

    def _reader(self, p: int, of_tile: str = "") -> Callable[[Node], Node | None]:
        """What takes the place of a load in the phase `p`; `of_tile`: the load makes one."""
        phase = self.kernel.phases[p]
        here = {st.buffer for st in phase.body if not isinstance(st, Reduce) and st.buffer not in self.tiles}

        def leaf(ld: Node) -> Node | None:
            t = self.tiles.get(ld.attr.buffer)
            if t is None or t.buffer.name in self.keep:
                return None
            name = t.buffer.name
            if not isinstance(t.store, Store) or t.store.mode != "set" or t.store.mask is not None:
                self.spilled.setdefault(name, "it is no plain value of each point")
                return None
            in_order = in_loop_order(ld.attr.index, t.buffer.shape, phase.inner)
            # What was stored since may be what the tile was computed from.
            over = self.stored[p] - self.stored[t.phase]
            if name in self.permuted or not in_order:
                over = over | here  # the phase stores over what it reads at the very point, but not at others
                if of_tile:
                    self.permuted.add(of_tile)
            read = {inner.attr.buffer for inner in t.store.value.loads()}
            if again := read & over:
                self.spilled.setdefault(name, f"{min(again)!r}, of which it is made, is stored over before it is read")
                return None
            self.no_alias |= {(r, w) for r in read.intersection(self.kernel.reads) for w in over}
            mapping: dict[Atom, int | Expr] = dict.fromkeys(t.inner, 0)
            for place, at in zip(t.store.index, ld.attr.index, strict=True):
                if place.var is not None:
                    mapping[place.var] = at
                elif place != 0:
                    self.spilled.setdefault(name, "it is written in another order than its loops")
                    return None
            made = rebuild(t.store.value, lambda _: None, mapping)
            if not ld.args or in_order:
                return made
            # Where the mask does not hold the point may be none of the row's.
            return masked(made, ld.args[0], {x for x in made.loads() if x.attr.buffer.startswith(REDUCED)})

        return leaf
