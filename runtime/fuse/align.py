"""Whether a nest may join a group, and how their loops line up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ..ir.index import Atom, Expr, Quotient, Var, expr, of, product, size
from ..ir.nodes import Buffer, Nest, Node
from ..kernels.access import along, in_order, same_loops, within_point
from ..machine import Gpu
from .groups import Group, Member, rename, substitute

NO_LAYOUTS: Mapping[str, Buffer] = MappingProxyType({})


class Alignment:
    """One try to let `nest` join `group`. Nothing changes in the group unless `run` returns True."""

    def __init__(
        self, group: Group, nest: Nest, gpu: Gpu | None = None, layouts: Mapping[str, Buffer] = NO_LAYOUTS
    ) -> None:
        self.group, self.gpu, self.layouts = group, gpu, layouts
        self.outer = list(group.outer)
        self.members = list(group.members)
        self.nest = nest
        self.body = nest.body
        self.index: tuple[Expr, ...] = nest.vars
        self.fresh = group.fresh
        scanned = nest.vars[nest.scan_dim].var if nest.scan is not None else None
        self.inner_vars: list[Var] = [*([scanned] if scanned is not None else []), *nest.rvars]  # must stay inner
        self.free: list[Var] = [v for v in nest.loop_vars if v is not scanned]
        self.why = "their loops do not line up"  # where `run` returns False, for readers

    def run(self) -> bool:
        for _ in range(6):
            step = self._split_once()
            if step is None:
                return False
            if not step:
                break
        mapping = self._match()
        if mapping is None:
            return False
        if self.nest.scan is not None and any(mapping.get(v) not in self.outer for v in self.free):
            # Its rows would follow each other in one inner loop, as if they were one.
            return self._no("running results go along one loop of their own")
        return self._commit(mapping)

    def _no(self, why: str) -> bool:
        self.why = why
        return False

    def _links(self) -> list[tuple[Member, Node]]:
        names = {m.name: m for m in self.members}
        return [(names[ld.attr.buffer], ld) for ld in self.body.loads() if ld.attr.buffer in names]

    def _split_once(self) -> bool | None:
        """Split one variable where one side has it as mixed-radix parts. True: something changed; None: hopeless."""
        # A scan runs along one loop.
        mine = set(self.free) if self.nest.scan is not None else {*self.free, *self.inner_vars}
        scanned = {v for m in self.members if m.nest.scan is not None for v in m.inner}
        for member, ld in self._links():
            for place, e in zip(member.index, ld.attr.index, strict=True):
                if place.var is None or place.var in scanned:
                    continue
                if e.var is None and not e.is_const:
                    parts = mixed_radix(e, place.var.extent)
                    if parts is not None:
                        self._split_group(place.var, parts)
                        return True
                    for a in sorted((a for a in e.atoms() if isinstance(a, Quotient)), key=lambda a: a.text):
                        v = a.num.var
                        if v in mine and a.den.is_const and isinstance(v.extent, int) and v.extent % int(a.den) == 0:
                            self._split_nest(v, int(a.den))
                            return True
        return False

    def _new_var(self, prefix: str, extent: int | Expr) -> Var:
        self.fresh += 1
        return Var(f"{prefix}{self.fresh}", size(extent))

    def _split_group(self, target: Var, parts: list[Var]) -> None:
        prefix = "o" if target in self.outer else "r"
        new = [self._new_var(prefix, p.extent) for p in parts]
        total: Expr = expr(0)
        for v in new:
            total = total * v.extent + of(v)
        mapping = {target: total}
        self.members = [rename(m, mapping) for m in self.members]
        if target in self.outer:
            at = self.outer.index(target)
            self.outer[at : at + 1] = new

    def _split_nest(self, v: Var, low: int) -> None:
        hi, lo = self._new_var("n", size(expr(v.extent) // low)), self._new_var("n", low)
        mapping: dict[Atom, Expr] = {v: of(hi) * low + of(lo)}
        self.body = substitute(self.body, mapping)
        self.index = tuple(e.subst(mapping) for e in self.index)
        for vars_ in (self.free, self.inner_vars):
            if v in vars_:
                at = vars_.index(v)
                vars_[at : at + 1] = [x for x in (hi, lo) if x.extent != 1]

    def _match(self) -> dict[Var, Var] | None:
        """Map the nest's variables to the group's. Outer variables of the group that find no partner leave `self.outer`."""
        taken: dict[Var, Var] = {}  # nest variable → group variable
        bound: dict[Var, Var | None] = {}  # group variable → nest variable, None: cannot stay outer
        links = self._links()
        for member, ld in links:
            for place, e in zip(member.index, ld.attr.index, strict=True):
                g = place.var
                if place.is_const and not e.is_const:
                    self.why = "a checked position lies in a dimension of size 1"  # a tile would not know of it
                    return None
                if g is None:
                    continue
                v = e.var
                ok = v is not None and v.extent == g.extent and bound.get(g, v) is v and taken.get(v, g) is g
                if g in self.outer and (not ok or v in self.inner_vars):
                    bound[g] = None
                elif not ok:
                    continue
                if ok and v is not None:
                    taken[v] = g
                    bound.setdefault(g, v)
        if not links:
            found = self._match_siblings()
            return self._match_rows() if found is None and self.gpu else found
        for m in {m.name: m for m, _ in links}.values():
            if m.scatter is not None:
                self.why = "an indexed update ends its kernel"
                return None
        # A group variable no load speaks of (a row value used by a wider nest has all of them; a narrower one does not) cannot stay outer.
        keep = [g for g in self.outer if bound.get(g) is not None]
        dropped = [g for g in self.outer if g not in keep]
        if dropped and any(m.reduces or m.nest.scan is not None for m in self.members):
            self.why = f"the kernel reduces at each point of {_loops(dropped)}, and the reader needs all of these points at once"
            return None
        if dropped and not self._is_profitable(keep, dropped):
            self.why = f"one kernel could not run the points of {_loops(dropped)} side by side"
            return None
        self.outer = keep
        return taken

    def _is_profitable(self, keep: list[Var], dropped: list[Var]) -> bool:
        """Dropping outer variables narrows the parallel loops; fine when the nest reduces over what is dropped. Of a reduction to one value
        the threads share the inner loops, which cannot be tiled for transposed access.
        """
        if not keep:
            return bool(self.nest.rvars) and all(in_order(m.body, dropped) for m in self.members)
        return bool(self.nest.rvars or self.nest.scan)

    def _are_small(self) -> bool:
        """Whether the nest and all members are reductions whose launches cost more than they do: of the parts of longer ones, mostly."""
        if not self.gpu or any(m.nest.reduce is None and m.inner for m in self.members):
            return False
        points = product(v.extent for v in (*self.free, *self.inner_vars))
        return (
            self.nest.reduce is not None
            and any(m.reduces for m in self.members)
            and isinstance(points, int)
            and points <= self.gpu.costs.split.values
        )

    def _match_siblings(self) -> dict[Var, Var] | None:
        """No value flows between them: only equal iteration spaces that read the same data are put together."""
        self.why = "neither reads the other, and they do not read the same elements in the same loops"
        shared = {n.attr.buffer for n in self.body.loads()} & {
            n.attr.buffer for m in self.members for n in m.body.loads()
        }
        if [v.extent for v in self.free] != [g.extent for g in self.outer] or not (shared or self._are_small()):
            return None
        if self.inner_vars or any(m.inner for m in self.members):
            mine = [v.extent for v in self.inner_vars]
            if not any([g.extent for g in m.inner] == mine for m in self.members):
                return None
        taken = dict(zip(self.free, self.outer, strict=True))
        mapping = {v: of(g) for v, g in taken.items()}
        body = substitute(self.body, mapping)
        theirs = {n.attr for m in self.members for n in m.body.loads()}
        if not self.inner_vars and not any(n.attr in theirs for n in body.loads()):
            return None
        return taken

    def _match_rows(self) -> dict[Var, Var] | None:
        """No value flows between them, but they read one buffer at the same points: rows of the one are rows of the other."""
        for m in reversed(self.members):
            if m.scatter is not None or m.nest.scan is not None:
                return None
            theirs = {ld.attr.buffer: ld.attr.index for ld in m.body.loads()}
            for ld in self.body.loads():
                taken = same_loops(ld.attr.index, theirs.get(ld.attr.buffer, ()))
                if taken is None or not taken.keys() >= {*self.free, *self.inner_vars}:
                    continue
                rows = {taken[v] for v in self.free}
                dropped = [g for g in self.outer if g not in rows]
                if not set(dropped) <= {taken[v] for v in self.inner_vars}:
                    continue
                if dropped and (any(m.reduces for m in self.members) or len(dropped) == len(self.outer)):
                    continue
                kept = [g for g in self.outer if g in rows]
                if not along(self.body, [v for v, g in taken.items() if g not in kept]):
                    continue
                if not all(along(member.body, dropped) for member in self.members):
                    continue
                self.outer = kept
                return taken
        return None

    def _commit(self, taken: dict[Var, Var]) -> bool:
        mapping: dict[Atom, Expr] = {v: of(g) for v, g in taken.items()}
        # Group variables that are inner from now on keep their objects, so that access through them stays elementwise.
        outer = set(self.outer)
        unchanged = tuple(self.outer) == self.group.outer
        members: list[Member] = list(self.members) if unchanged else []
        for m in () if unchanged else self.members:
            inner_now = sorted(
                (a for e in m.index for a in e.atoms() if isinstance(a, Var) and a not in outer),
                key=lambda a: _position(m, a),
            )
            rest = [v for v in m.inner if v not in inner_now]
            members.append(replace(m, inner=(*inner_now, *rest) if m.scatter is None else m.inner))
        used = set(taken.values())
        known = list(dict.fromkeys(v for m in members for v in m.inner))
        for v in (*self.free, *self.inner_vars):
            if v in mapping:
                continue
            match = next((g for g in known if g.extent == v.extent and g not in used), None)
            if match is None:
                match = self._new_var("r", v.extent)
            used.add(match)
            mapping[v] = of(match)
        index = tuple(e.subst(mapping) for e in self.index)
        body = substitute(self.body, mapping)
        inner: list[Var] = []
        for v in (*self.free, *self.inner_vars):
            g = mapping[v].var
            assert g is not None
            if g not in outer:
                inner.append(g)
        if self.nest.reduce is not None and any(mapping[v].var not in outer for v in self.free):
            return self._no("a reduction would not have one value for each point of the outer loops")
        if self.nest.reduce is not None and {mapping[v].var for v in self.free} != outer:
            return self._no("a reduction would be made again at several points of the outer loops")
        if len({mapping[v].var for v in (*self.free, *self.inner_vars)}) != len(self.free) + len(self.inner_vars):
            return False
        if outer - {mapping[v].var for v in self.free}:
            return False
        for member, ld in self._links():
            for place, e in zip(member.index, ld.attr.index, strict=True):
                if not within_point(place, e.subst(mapping), outer):
                    return self._no(f"it reads elements of {member.name} that other points of the outer loops make")
                if (
                    self.gpu
                    and member.nest.scan is not None
                    and not self._stays(member, place, e.subst(mapping), self.gpu)
                ):
                    return self._no("running results that stay in registers are read at other points, or are too long")
        new = Member(replace(self.nest, body=self.body), index, tuple(inner), body)
        if self._underutilizes([*members, new]):
            return self._no("too few programs would go through too many points each")
        self.group.outer = tuple(self.outer)
        self.group.members = [*members, new]
        self.group.fresh = self.fresh
        return True

    def _stays(self, member: Member, place: Expr, e: Expr, gpu: Gpu) -> bool:
        """Whether running results can be read in the kernel that makes them: a GPU keeps them in registers, each where it was made."""
        row = product(v.extent for v in member.inner)
        return (
            place == e
            and isinstance(row, int)
            and row <= (gpu.budgets.column if self._lies_along_outer(member) else gpu.budgets.row)
        )

    def _underutilizes(self, members: list[Member]) -> bool:
        """Whether fewer programs than the device has room for would go through many points each, with no reduction to make them."""
        if not self.gpu or any(m.nest.cooperative for m in members):
            return False
        outer = product(v.extent for v in self.outer)
        if not isinstance(outer, int):
            return False
        for m in members:
            n = product(v.extent for v in m.inner)
            if m.reduces or not isinstance(n, int):
                continue
            # Neighbours in memory that are different outer points belong to one program.
            together = max(1, min(self.gpu.costs.split.columns, outer)) if self._lies_along_outer(m) else 1
            if -(-outer // together) < self.gpu.num_sms and n * together > self.gpu.costs.alone:
                return True
        return False

    def _lies_along_outer(self, m: Member) -> bool:
        """Whether what a member stores lies along the outer loops in memory."""
        layout = self.layouts.get(m.name)
        if layout is None or layout.stride is None:
            return False
        near = [e for e, n, s in zip(m.index, layout.shape, layout.stride, strict=True) if s == 1 and n != 1]
        return any(
            not atoms.isdisjoint(self.outer) and atoms.isdisjoint(m.inner) for e in near for atoms in [e.atoms()]
        )


def _loops(loops: list[Var]) -> str:
    sizes = " x ".join(str(v.extent) for v in loops)
    return f"a loop of {sizes}" if len(loops) == 1 else f"loops of {sizes}"


def _position(m: Member, v: Var) -> int:
    for k, e in enumerate(m.index):
        c = e.coefficient(v)
        if c is None or c != 0:
            return k * 1000 - (int(c) if c is not None and c.is_const and int(c) < 1000 else 0)
    return 10**6


def mixed_radix(e: Expr, extent: int | Expr) -> list[Var] | None:
    """The variables of `e` from slow to fast, if `e` counts 0..extent-1 exactly once as they run (like `i*12 + j` with j < 12)."""
    if not isinstance(extent, int):
        return None
    parts: list[tuple[int, Var]] = []
    for monomial, c in e.terms:
        if len(monomial) != 1 or not isinstance(monomial[0], Var) or not isinstance(monomial[0].extent, int) or c <= 0:
            return None
        parts.append((c, monomial[0]))
    parts.sort(key=lambda p: (-p[0], p[1].text))
    step = 1
    for c, v in reversed(parts):
        if c != step or not isinstance(v.extent, int):
            return None
        step *= v.extent
    return [v for _, v in parts] if step == extent and len(parts) > 1 else None
