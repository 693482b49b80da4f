"""Small groups over the same points made one: their launches take longer than they do.

The fuser lets an item join one group that is there. A value that is made of several groups' values, as a gate of a recurrent cell's backward
is, leaves the others alone; here they are moved to it, or it to them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ...generated.targets import GpuCosts
from ..ir.guards import checks
from ..ir.index import Atom, Expr, Var, of, product
from ..ir.nodes import Buffer
from ..kernels.plan import ViewOf
from ..kernels.steps import nbytes
from .groups import Group, Member, rename
from .nests import MAX_BUFFERS, MAX_MEMBERS

SIDE_BY_SIDE = 16  # members of a group made of some that do not read each other: kernels that are alike can run as one launch anyway
NEAREST = 4  # groups before that read a buffer too


def fuse_small(
    groups: Sequence[Group],
    views: Mapping[str, ViewOf],
    layouts: Mapping[str, Buffer],
    costs: GpuCosts,
    held: Collection[str] = (),
    stores: Sequence[tuple[str, str]] = (),
) -> list[Group]:
    """The groups, in an order in which they can run, with small ones moved into others that read what they store or what they read.

    groups  in an order in which they can run.
    views   buffers that are views of others.
    costs   what a launch is worth.
    held    buffers that are returned.
    stores  by input that is written, the buffer of its new contents. Groups that make or read one of the two are left as they are, or the
            contents could not be written in place.

    A group runs where one of the two stood: the first where all that the second reads is there by then, else the second if nothing in between
    reads the first. No more bytes than a launch is worth live longer for that, unless others live shorter.
    """
    return _Joined(groups, views, layouts, costs, held, stores).run()


class _Joined:
    """Groups by their place, of which some have become part of others."""

    def __init__(
        self,
        groups: Sequence[Group],
        views: Mapping[str, ViewOf],
        layouts: Mapping[str, Buffer],
        costs: GpuCosts,
        held: Collection[str],
        stores: Sequence[tuple[str, str]],
    ) -> None:
        self.groups: list[Group | None] = list(groups)
        self.views, self.layouts, self.costs = views, layouts, costs
        self.held = self._behind(held)
        written = self._behind([name for pair in stores for name in pair])
        self.small = [_is_small(g, costs) and written.isdisjoint({*self._reads(g), *_writes(g)}) for g in groups]
        self.made: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}  # places, in order
        for k, group in enumerate(groups):
            for name in self._reads(group):
                self.readers.setdefault(name, []).append(k)
            for name in _writes(group):
                self.made[name] = k

    def run(self) -> list[Group]:
        for k, group in enumerate(self.groups):
            at = k if group is not None and self.small[k] else None
            while at is not None:
                at = next((to for other in self._near(at) if (to := self._join(other, at)) is not None), None)
        return [g for g in self.groups if g is not None]

    def _reads(self, group: Group) -> set[str]:
        """Buffers that are read, those behind views too."""
        if group.extern is not None:
            return self._behind(group.extern.reads())
        return self._behind({n for m in group.members for n in m.nest.reads()})

    def _behind(self, names: Collection[str]) -> set[str]:
        """These buffers and, of views, what they are views of."""
        found = set(names)
        for name in names:
            while name in self.views:
                name = self.views[name].buffer
                found.add(name)
        return found

    def _near(self, at: int) -> list[int]:
        """Small groups before, those that make what it reads first, then those that read the same, the latest first."""
        group = self.groups[at]
        assert group is not None
        reads = self._reads(group)
        makers = {self.made[n] for n in reads if n in self.made}
        sharers: set[int] = set()
        for name in reads:
            places = self.readers[name]
            end = bisect_right(places, at - 1)
            sharers.update(places[max(0, end - NEAREST) : end])
        found = [*sorted(makers, reverse=True), *sorted(sharers - makers, reverse=True)]
        return [k for k in found if k < at and self.small[k]]

    def _join(self, first: int, second: int) -> int | None:
        """Make two groups one, and tell where it is; None where that cannot be."""
        a, b = self.groups[first], self.groups[second]
        assert a is not None
        assert b is not None
        merged = _merged(a, b)
        if merged is None:
            return None
        reads_a, reads_b, writes_a, writes_b = self._reads(a), self._reads(b), _writes(a), _writes(b)
        close = not any(self.groups[first + 1 : second])
        if all(self.made.get(n, -1) <= first for n in reads_b) and (
            close or self._may_live(writes_b, [n for n in reads_b if self._last(n, but=second) <= first])
        ):
            to, gone = first, second
        elif all((self._next(n, first) or second) >= second for n in writes_a) and (
            close or self._may_live([n for n in reads_a if self._last(n) < second], writes_a)
        ):
            to, gone = second, first
        else:
            return None
        self.groups[to], self.groups[gone] = merged, None
        for name in (*writes_a, *writes_b):
            self.made[name] = to
        for name in reads_a | reads_b:
            self.readers[name] = sorted({to if k == gone else k for k in self.readers[name]})
        return to

    def _next(self, name: str, place: int) -> int | None:
        """Where a value is read next after a place."""
        places = self.readers.get(name, [])
        k = bisect_right(places, place)
        return places[k] if k < len(places) else None

    def _last(self, name: str, but: int = -1) -> float:
        """Where a value of the graph's own is read last, one place left out; never, if it is not let go of then."""
        if name not in self.made or name in self.held:
            return math.inf
        return max((k for k in self.readers[name] if k != but), default=-1)

    def _may_live(self, longer: Iterable[str], shorter: Iterable[str]) -> bool:
        """Whether some values may live longer if others live shorter for it."""
        more = self._bytes(longer)
        return more <= self.costs.launch_bytes or more <= self._bytes(shorter)

    def _bytes(self, names: Iterable[str]) -> float:
        """Of buffers, without bound where a size is a symbol."""
        sizes = [nbytes(self.layouts[n]) for n in names if n in self.layouts]
        return math.inf if None in sizes else sum(n for n in sizes if n is not None)


def _writes(group: Group) -> tuple[str, ...]:
    if group.extern is not None:
        return tuple(b.name for b in group.extern.outs)
    return tuple(m.name for m in group.members)


def _points(group: Group) -> float:
    """That its loops go through, without bound where a size is a symbol."""
    points = product(v.extent for v in group.outer)
    return points if isinstance(points, int) else math.inf


def _is_small(group: Group, costs: GpuCosts) -> bool:
    """Whether it computes single values at few points, and cannot raise."""
    if group.extern is not None or group.closed or group.grid_loop:
        return False
    if any(m.inner or m.scatter or m.accumulates or m.nest.reduce or m.nest.scan for m in group.members):
        return False
    return _points(group) <= costs.launch_points and not checks(m.body for m in group.members)


def _merged(a: Group, b: Group) -> Group | None:
    """Both as one group over the loops of the first, if they go through equal loops and values pass within a point."""
    if [v.extent for v in a.outer] != [v.extent for v in b.outer]:
        return None
    if len(a.members) + len(b.members) > MAX_MEMBERS or len(a.reads | b.reads) > MAX_BUFFERS:
        return None
    mapping: dict[Atom, Expr] = {v: of(w) for v, w in zip(b.outer, a.outer, strict=True)}
    members = [rename(m, mapping) for m in b.members]
    made = a.names()
    passed = [(made[ld.attr.buffer], ld) for m in members for ld in m.body.loads() if ld.attr.buffer in made]
    if any(ld.attr.index != p.index for p, ld in passed):
        return None
    if not passed:
        together = len(a.members) + len(members)
        if together > SIDE_BY_SIDE or not _side_by_side(a.members, members, a.outer):
            return None
    return replace(a, members=[*a.members, *members], reads=a.reads | b.reads, fresh=max(a.fresh, b.fresh))


def _side_by_side(a: Sequence[Member], b: Sequence[Member], outer: tuple[Var, ...]) -> bool:
    """Whether they read one buffer at every point, at a constant distance."""
    places: dict[str, list[tuple[Expr, ...]]] = {}
    for m in a:
        for ld in m.body.loads():
            if {*outer} <= {v for e in ld.attr.index for v in e.atoms()}:
                places.setdefault(ld.attr.buffer, []).append(ld.attr.index)
    return any(
        all((e - f).is_const for e, f in zip(ld.attr.index, other, strict=True))
        for m in b
        for ld in m.body.loads()
        for other in places.get(ld.attr.buffer, ())
    )


__all__ = ["fuse_small"]
