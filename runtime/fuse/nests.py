"""Group nests into kernels: one greedy pass in program order, near-linear.

Every group has a set of outer variables shared by all its members, and a place in a fixed order of groups. A nest may join a group if
everything it reads was produced by that group or by an earlier one: the order then stays a valid execution order without any search.
Joining aligns loop variables through the loads between the members; a variable that does not line up becomes an inner one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..ir.index import Atom, Expr, Var, of
from ..ir.learned import symbols_of
from ..ir.nodes import Buffer, Extern, Nest
from ..kernels.plan import Refusal
from ..machine import Gpu
from .align import NO_LAYOUTS, Alignment
from .groups import Group, Member, substitute
from .substitution import map_scatter

MAX_MEMBERS = (
    64  # values of a kernel: each merge looks at all of them, and the compiler's time grows faster than the text
)
MAX_BUFFERS = 64  # that it reads: for the same reason


class Fuser:
    """Groups the items of one program. `group_of` tells which group defines each buffer."""

    def __init__(
        self,
        enabled: bool = True,
        gpu: Gpu | None = None,
        layouts: Mapping[str, Buffer] = NO_LAYOUTS,
        learned: Collection[str] = (),
    ) -> None:
        self.enabled, self.gpu, self.layouts, self.learned = enabled, gpu, layouts, learned
        self.groups: list[Group] = []
        self.first = 0  # groups before that are not joined any more
        self.group_of: dict[str, int] = {}  # of buffers, and of the symbols that are `learned`
        self.readers: dict[str, list[int]] = {}
        self.after: dict[int, list[int]] = {}  # groups that begin with what reads a group's results, and none later
        self.refused: list[Refusal] = []

    def add(self, item: Nest | Extern) -> None:
        needs = item.reads() if not self.learned else (*item.reads(), *symbols_of(item))
        earliest = max((self.group_of.get(n, -1) for n in needs), default=-1)
        if isinstance(item, Extern):
            group = self._new_group()
            group.extern, group.closed = item, True
            for name in (*(b.name for b in item.outs), *(s.symbol for s in item.learns)):
                self.group_of[name] = group.number
            return
        refused: list[Refusal] = []
        for number in self._candidates(item, earliest, refused):
            trial = Alignment(self.groups[number], item, self.gpu, self.layouts)
            if trial.run():
                return self._note(self.groups[number], item)
            refused.append(Refusal(item.name, self.groups[number].members[0].name, trial.why))
        self.refused += refused
        group = self._new_group()
        _start(group, item)
        self.after.setdefault(earliest, []).append(group.number)
        self._note(group, item)

    def _new_group(self) -> Group:
        self.groups.append(Group(len(self.groups)))
        return self.groups[-1]

    def _note(self, group: Group, item: Nest) -> None:
        self.group_of[item.name] = group.number
        for name in item.reads():
            if name not in group.reads:
                group.reads.add(name)
                self.readers.setdefault(name, []).append(group.number)

    def _candidates(self, item: Nest, earliest: int, refused: list[Refusal]) -> list[int]:
        """Groups worth trying: the one of the latest producer, then those that read the same buffers (latest first, a few)."""
        if not self.enabled or item.scatter is not None:
            why = "an indexed update is a kernel of its own" if self.enabled else "the setting fusion is off"
            refused.append(Refusal(item.name, "", why))
            return []
        found = [earliest] if earliest >= 0 else []
        siblings: set[int] = set()
        for name in item.reads():
            siblings.update(n for n in self.readers.get(name, ())[-4:] if n > earliest)
        found += sorted(siblings, reverse=True)[:4]
        if self.gpu and item.reduce is not None and earliest >= 0:
            found += [n for n in self.after.get(earliest, ())[-2:] if n not in found]
        return [n for n in found if self._is_open(n, item, refused)]

    def _is_open(self, number: int, item: Nest, refused: list[Refusal]) -> bool:
        group = self.groups[number]
        if group.extern is not None:
            return False
        full = len(group.members) >= MAX_MEMBERS or len(group.reads) >= MAX_BUFFERS
        if number >= self.first and not group.closed and not full:
            return True
        why = "an indexed update ends its kernel" if group.closed else "it comes last, after what may raise"
        limit = f"a kernel computes at most {MAX_MEMBERS} values and reads at most {MAX_BUFFERS} buffers"
        refused.append(Refusal(item.name, group.members[0].name, limit if full else why))
        return False


def _start(group: Group, nest: Nest) -> None:
    """A group of one nest: canonical names o0… for outer and r0… for inner variables."""
    if nest.scatter is not None:
        group.closed = True
        inner = tuple(Var(f"r{k}", v.extent) for k, v in enumerate(nest.scatter.domain))
        mapping: dict[Atom, Expr] = {v: of(r) for v, r in zip(nest.scatter.domain, inner, strict=True)}
        scatter = map_scatter(nest.scatter, lambda n: substitute(n, mapping))
        scatter = replace(scatter, index=tuple(e.subst(mapping) for e in scatter.index))
        group.members.append(Member(nest, nest.vars, inner, substitute(nest.body, mapping), scatter))
        return
    scanned = nest.vars[nest.scan_dim].var if nest.scan is not None else None
    outer_vars = [v for v in nest.loop_vars if v is not scanned]
    inner_vars = [*([scanned] if scanned is not None else []), *nest.rvars]
    mapping = {v: of(Var(f"o{k}", v.extent)) for k, v in enumerate(outer_vars)}
    mapping |= {v: of(Var(f"r{k}", v.extent)) for k, v in enumerate(inner_vars)}
    group.outer = tuple(Var(f"o{k}", v.extent) for k, v in enumerate(outer_vars))
    group.fresh = max(len(outer_vars), len(inner_vars))
    index = tuple(e.subst(mapping) for e in nest.vars)
    inner = tuple(Var(f"r{k}", v.extent) for k, v in enumerate(inner_vars))
    group.members.append(Member(nest, index, inner, substitute(nest.body, mapping)))
