"""Groups of nests that become one kernel each: the members' loops are named alike."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..ir.index import Expr, Var, expr, of
from ..ir.nodes import Extern, Nest, Node, Scatter, rebuild
from .substitution import map_scatter


@dataclass(frozen=True)
class Member:
    """A nest whose variables were renamed to the group's. `index`: where it stores, in group variables; `inner`: its own loops."""

    nest: Nest
    index: tuple[Expr, ...]
    inner: tuple[Var, ...]
    body: Node
    scatter: Scatter | None = None
    accumulates: bool = False  # a reduction over the grid loop of its group

    @property
    def name(self) -> str:
        return self.nest.name

    @property
    def reduces(self) -> bool:
        return self.nest.reduce is not None and not self.accumulates


@dataclass
class Group:
    number: int
    outer: tuple[Var, ...] = ()
    members: list[Member] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)
    extern: Extern | None = None
    closed: bool = False
    fresh: int = 0
    grid_loop: tuple[Var, ...] = ()  # as of a kernel

    def names(self) -> dict[str, Member]:
        return {m.name: m for m in self.members}


def substitute(node: Node, mapping: dict) -> Node:
    return rebuild(node, lambda _: None, mapping)


def rename(member: Member, mapping: dict) -> Member:
    """The member with loop variables replaced by expressions (each `inner` variable must map to a variable, or be split by the caller)."""
    inner: list[Var] = []
    for v in member.inner:
        target = expr(mapping[v]) if v in mapping else of(v)
        inner += sorted((a for a in target.atoms() if isinstance(a, Var)), key=lambda a: _order(a, target))
    scatter = member.scatter
    if scatter is not None:
        scatter = map_scatter(scatter, lambda n: substitute(n, mapping))
        scatter = replace(scatter, index=tuple(e.subst(mapping) for e in scatter.index))
    return replace(
        member,
        index=tuple(e.subst(mapping) for e in member.index),
        inner=tuple(inner),
        body=substitute(member.body, mapping),
        scatter=scatter,
    )


def _order(v: Var, e: Expr) -> tuple[int, str]:
    c = e.coefficient(v)
    return (-int(c) if c is not None and c.is_const else 0, v.text)
