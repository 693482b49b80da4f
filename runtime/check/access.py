"""What the checker asks about single accesses and expressions of a kernel: its loads and stores, roots, variables, text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from ..ir.facts import equal
from ..ir.index import Expr, Val, Var, bounds, expr, of
from ..ir.nodes import Node, indirect, rebuild
from ..kernels.plan import Reduce, Statement, Store

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Access:
    """A load or a store. `phase` and `at` (the statement's number in its phase) say when it happens for one outer point."""

    buffer: str
    index: tuple[Expr, ...]
    phase: int
    at: int
    guarded: bool = False
    loops: tuple[Var, ...] = ()  # of a store: those that it is made for each point of


def keep(_: Node) -> None:
    return None


def mapped(e: Expr, mapping: Mapping) -> Expr:
    return e.subst(mapping, lambda v: indirect(rebuild(v.node, keep, mapping), v.lo, v.hi))


def roots(st: Statement) -> list[Node]:
    roots = [st.value]
    if isinstance(st, Store) and st.mask is not None:
        roots.append(st.mask)
    if not isinstance(st, Reduce):
        roots += [a.node for e in st.index for a in sorted(e.atoms(), key=lambda a: a.text) if isinstance(a, Val)]
    return roots


def vars_of(e: Expr) -> set[Var]:
    found: set[Var] = set()
    for a in e.atoms():
        if isinstance(a, Var):
            found.add(a)
        elif isinstance(a, Val):
            found |= a.node.vars()
    return found


def same_index(a: Sequence[Expr], b: Sequence[Expr]) -> bool:
    return all(equal(x, y) for x, y in zip(a, b, strict=True))


def volume(box: Sequence[tuple[int, int]]) -> int:
    total = 1
    for lo, hi in box:
        total *= hi - lo
    return total


def show(index: Sequence[Expr]) -> str:
    return ", ".join(e.text for e in index)


def short(n: Node) -> str:
    text = n.text
    return text if len(text) <= 120 else f"{text[:117]}…"


def stride_of(e: Expr, outer: Sequence[Var]) -> tuple[Expr, int] | None:
    """(q, g) for a coordinate g * q + rest, where q is of outer loops only and 0 <= rest < g: equal coordinates have equal q."""
    parts = [(v, c) for v in outer if (c := e.coefficient(v)) is not None and c != 0]
    if not parts or any(not isinstance(c, Expr) or not c.is_const for _, c in parts):
        return None
    g = gcd(*(int(c) for _, c in parts))
    rest = e - sum((of(v) * int(c) for v, c in parts), expr(0))
    lo, hi = bounds(rest)
    if vars_of(rest) & set(outer) or lo is None or hi is None or lo < 0 or hi >= g:
        return None
    return sum((of(v) * (int(c) // g) for v, c in parts), expr(0)), g
