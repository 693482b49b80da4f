"""Fused outer reductions: sums over the columns of what another kernel reads by rows become part of that kernel, which goes through rows in a serial
grid loop and accumulates their columns on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from ..ir.facts import covers
from ..ir.index import Atom, Expr, Var, of, product
from ..ir.nodes import ITEMSIZE, Node
from ..kernels.plan import ViewOf
from ..machine import Gpu
from .groups import Group, Member, rename, substitute


def fuse_outer_reductions(groups: Sequence[Group], views: Mapping[str, ViewOf], gpu: Gpu) -> list[Group]:
    """The groups, in an order in which they can run, with reductions over rows moved into a group that goes through these rows.

    views  buffers that are views of others.

    The sums of the columns stay in registers. At least one program for each multiprocessor is left to share the rows.
    """
    left = list(groups)
    for columns in groups:
        if not _reduces_columns(columns):
            continue
        for rows in left:
            if rows is columns or rows.reads.isdisjoint(columns.reads) or not _goes_by_rows(rows, gpu):
                continue
            merged = _merged(rows, columns)
            if (
                merged is None
                or int(product(v.extent for v in merged.outer if v not in merged.grid_loop)) < gpu.num_sms
            ):  # type: ignore[arg-type]
                continue
            order = _placed(left, rows, columns, merged, views)
            if order is not None:
                left = order
                break
    return left


def _plain(group: Group) -> bool:
    return (
        group.extern is None
        and not group.grid_loop
        and all(m.scatter is None and m.nest.scan is None for m in group.members)
        and all(isinstance(v.extent, int) for v in (*group.outer, *(v for m in group.members for v in m.inner)))
    )


def _reduces_columns(group: Group) -> bool:
    inner = {m.inner for m in group.members}
    return _plain(group) and len(inner) == 1 and all(inner) and all(m.reduces for m in group.members)


def _goes_by_rows(group: Group, gpu: Gpu) -> bool:
    inner = {m.inner for m in group.members if m.inner}
    if not _plain(group) or len(inner) != 1 or not any(m.reduces for m in group.members):
        return False
    (loops,) = inner
    last = {ld.attr.index[-1].var for m in group.members for ld in m.body.loads() if ld.attr.index}
    return 1 < int(product(v.extent for v in loops)) <= gpu.budgets.accumulated_row and loops[-1] in last  # type: ignore[arg-type]


def _merged(rows: Group, columns: Group) -> Group | None:
    """Both in one group that reads what they share once, or None where they share less than half of what `columns` reads."""
    fresh = max(rows.fresh, columns.fresh) + 1
    own = (*columns.outer, *columns.members[0].inner)
    renamed: dict[Atom, Expr] = {v: of(Var(f"w{fresh + k}", v.extent)) for k, v in enumerate(own)}
    inner = next(m.inner for m in rows.members if m.inner)
    theirs = {ld.attr.buffer: ld for m in rows.members for ld in m.body.loads() if not ld.vars().isdisjoint(inner)}
    for ld in (ld for m in columns.members for ld in m.body.loads()):
        other = theirs.get(ld.attr.buffer)
        found = None if other is None else _aligned(ld, other, rows, columns, inner)
        if found is None:
            continue
        along, across = (
            found  # loops of `rows` by those of `columns`, and loops of `columns` that are loops along a row
        )
        parts: dict[Atom, int | Expr] = {v: renamed[v] for v in own if v not in across}
        places = [e.subst(parts) for e in (along[v] for v in rows.outer)]
        loops = [e.var for e in parts.values() if isinstance(e, Expr) and e.var is not None]
        if not covers(places, [v.extent for v in rows.outer], loops):
            continue
        members = [rename(m, dict(zip(rows.outer, places, strict=True))) for m in rows.members]
        mapping: dict[Atom, int | Expr] = {**parts, **{v: of(r) for v, r in across.items()}}
        added = [
            Member(
                m.nest, tuple(e.subst(mapping) for e in m.index), inner, substitute(m.body, mapping), accumulates=True
            )
            for m in columns.members
        ]
        if not _shares(members, added):
            continue
        grid_loop = tuple(v for w in columns.members[0].inner if (v := renamed[w].var) is not None)
        outer = (*(v for w in columns.outer if w in parts and (v := renamed[w].var) is not None), *grid_loop)
        fresh += len(own)
        reads = rows.reads | columns.reads
        return Group(rows.number, outer, [*members, *added], reads, closed=True, fresh=fresh, grid_loop=grid_loop)
    return None


def _aligned(
    ld: Node, other: Node, rows: Group, columns: Group, inner: tuple[Var, ...]
) -> tuple[dict[Var, Expr], dict[Var, Var]] | None:
    """If two loads of one buffer meet the same elements: the outer loops of `rows` as expressions, and partners of its inner loops."""
    along: dict[Var, Expr] = {}
    across: dict[Var, Var] = {}
    for mine, theirs in zip(ld.attr.index, other.attr.index, strict=True):
        v, w = theirs.var, mine.var
        if v in rows.outer and v is not None:
            if along.setdefault(v, mine) != mine:
                return None
        elif v is not None and v in inner:
            if w is None or w not in columns.outer or w.extent != v.extent or across.setdefault(w, v) is not v:
                return None
        elif mine != theirs or not mine.is_const:
            return None
    whole = set(along) == set(rows.outer) and set(across.values()) == set(inner) and len(across) == len(inner)
    return (along, across) if whole and not ld.args and not other.args else None


def _shares(rows: Sequence[Member], columns: Sequence[Member]) -> bool:
    """Whether at least half of the bytes that `columns` reads are read by `rows` anyway."""
    known = {ld.attr for m in rows for ld in m.body.loads()}
    loads = {ld.attr: ld for m in columns for ld in m.body.loads()}
    sizes = {a: int(product(v.extent for v in ld.vars())) * ITEMSIZE[ld.dtype] for a, ld in loads.items()}  # type: ignore[arg-type]
    return 2 * sum(n for a, n in sizes.items() if a in known) >= sum(sizes.values())


def _placed(
    groups: Sequence[Group], rows: Group, columns: Group, merged: Group, views: Mapping[str, ViewOf]
) -> list[Group] | None:
    """The groups with `merged` for both: after all that either reads, before all that read either; None if there is no such order."""
    rest = [merged if g is rows else g for g in groups if g is not columns]
    made: dict[str, int] = {}
    for k, g in enumerate(rest):
        made.update(dict.fromkeys(_defines(g), k))
    reads = [{views[n].buffer if n in views else n for n in (*g.reads, *_extern_reads(g))} for g in rest]
    waits = [{made[n] for n in names if n in made} - {k} for k, names in enumerate(reads)]
    readers: list[list[int]] = [[] for _ in rest]
    for k, before in enumerate(waits):
        for j in before:
            readers[j].append(k)
    left = [len(before) for before in waits]
    ready = [
        k for k, n in enumerate(left) if n == 0
    ]  # the first that may run comes first, so that the order stays as it was
    order: list[Group] = []
    while ready:
        k = heappop(ready)
        order.append(rest[k])
        for j in readers[k]:
            left[j] -= 1
            if left[j] == 0:
                heappush(ready, j)
    calls = [g for g in groups if g.extern is not None]
    return order if len(order) == len(rest) and calls == [g for g in order if g.extern is not None] else None


def _defines(group: Group) -> list[str]:
    return [b.name for b in group.extern.outs] if group.extern is not None else [m.name for m in group.members]


def _extern_reads(group: Group) -> set[str]:
    return set(group.extern.reads()) if group.extern is not None else set()


__all__ = ["fuse_outer_reductions"]
