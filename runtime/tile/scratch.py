"""Scratch tiles have no memory on a GPU: each is either a value that stays in registers, or computed again where it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...errors import UnsupportedError
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


def recompute_tiles(kernel: Kernel, persistent: bool, homes: Mapping[str, str] = MappingProxyType({})) -> Kernel:
    """The kernel with only those tiles left that can stay in registers: written and read in the order of equal loops, in one tile.

    homes  for buffers that are in the memory of another (updates in place), which one.
    """
    if not kernel.scratch:
        return kernel
    shapes = {b.name: b for b in kernel.scratch}
    tiles = {
        st.buffer: _Tile(shapes[st.buffer], p, phase.inner, st)
        for p, phase in enumerate(kernel.phases)
        for st in phase.body
        if not isinstance(st, Reduce) and st.buffer in shapes
    }
    keep = {name for name, t in tiles.items() if persistent and _in_order(kernel, t)}
    while (
        lost := {ld.attr.buffer for t in tiles.values() if t.buffer.name not in keep for ld in _loads(t.store)} & keep
    ):
        keep -= lost  # they are read at the points at which those are computed again
    phases: list[Phase] = []
    stored: list[set[str]] = []  # global memory that the phases before write
    so_far: set[str] = set()
    turned: set[str] = set()
    for p, phase in enumerate(kernel.phases):
        stored.append(set(so_far))
        body: list[Statement] = []
        for st in phase.body:
            if not isinstance(st, Reduce) and st.buffer in tiles and st.buffer not in keep:
                # What it holds must be known in terms of what is left.
                new = changed(st, {}, _reader(tiles, keep, stored, homes, p, phase, turned, st.buffer))
                assert not isinstance(new, Reduce)
                tiles[st.buffer] = replace(tiles[st.buffer], store=new)
                continue
            body.append(changed(st, {}, _reader(tiles, keep, stored, homes, p, phase, turned)))
            if not isinstance(st, Reduce) and st.buffer not in tiles:
                so_far.add(homes.get(st.buffer, st.buffer))
        phases.append(Phase(phase.inner, tuple(body)))
    return replace(kernel, phases=tuple(phases), scratch=tuple(b for b in kernel.scratch if b.name in keep))


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


def _reader(
    tiles: dict[str, _Tile],
    keep: set[str],
    stored: list[set[str]],
    homes: Mapping[str, str],
    p: int,
    phase: Phase,
    turned: set[str],
    of_tile: str | None = None,
) -> Callable[[Node], Node | None]:
    """What takes the place of a load in a phase. `turned`: tiles that are made of others at other points than their own; `of_tile`: the load
    makes one.
    """
    over = {
        homes.get(st.buffer, st.buffer) for st in phase.body if not isinstance(st, Reduce) and st.buffer not in tiles
    }

    def leaf(ld: Node) -> Node | None:
        t = tiles.get(ld.attr.buffer)
        if t is None or t.buffer.name in keep:
            return None
        name = t.buffer.name
        if not isinstance(t.store, Store) or t.store.mode != "set" or t.store.mask is not None:
            raise UnsupportedError(f"scratch tile {name!r} cannot be computed again where it is read")
        # A store in between may have gone over what the tile was computed from (an update in place).
        read = {homes.get(b, b) for b in (inner.attr.buffer for inner in t.store.value.loads())}
        if read & (stored[p] - stored[t.phase]):
            raise UnsupportedError(f"scratch tile {name!r} is read after stores; it cannot be computed again")
        in_order = in_loop_order(ld.attr.index, t.buffer.shape, phase.inner)
        if name in turned or not in_order:
            # The phase stores over what it reads at the very point, but not at others.
            if read & over:
                raise UnsupportedError(
                    f"scratch tile {name!r} is read at other points than those that are stored over; it cannot be computed again"
                )
            if of_tile is not None:
                turned.add(of_tile)
        mapping: dict[Atom, int | Expr] = dict.fromkeys(t.inner, 0)
        for place, at in zip(t.store.index, ld.attr.index, strict=True):
            if place.var is not None:
                mapping[place.var] = at
            elif place != 0:
                raise UnsupportedError(f"scratch tile {name!r} is written in another order than its loops")
        made = rebuild(t.store.value, lambda _: None, mapping)
        if not ld.args or in_order:
            return made
        # Where the mask does not hold the point may be none of the row's.
        return masked(made, ld.args[0], {x for x in made.loads() if x.attr.buffer.startswith(REDUCED)})

    return leaf
