"""Prepare a kernel for a loop language: flat indices, merged loops, and which loop variable runs over the lanes of a vector."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.index import Expr, Val, Var, expr, of
from ..ir.nodes import Buffer, LoadAt, Node, Size, contiguous_strides, indirect, rebuild, walk_all
from ..kernels.plan import REDUCED, Kernel, Phase, Reduce, Scan, Statement, Store
from ..kernels.steps import flat_index


@dataclass(frozen=True)
class FlatStatement:
    """A statement whose loads and store have one flat index each. `where` is None for a reduction."""

    source: Statement
    value: Node
    where: Expr | None = None
    mask: Node | None = None


@dataclass(frozen=True)
class FlatPhase:
    inner: tuple[Var, ...]
    body: tuple[FlatStatement, ...]


@dataclass(frozen=True)
class FlatKernel:
    """Of a piece of a loop: `start` is where it begins in that loop, `part` the variable of its own loop, if it has one."""

    kernel: Kernel
    outer: tuple[Var, ...]
    phases: tuple[FlatPhase, ...]
    start: Size = 0
    part: Var | None = None

    @property
    def reduces(self) -> bool:
        return any(isinstance(s.source, Reduce) for p in self.phases for s in p.body)


def flatten(kernel: Kernel, layouts: dict[str, Buffer]) -> FlatKernel:
    tiles = {b.name: Buffer(b.name, b.shape, b.dtype, contiguous_strides(b.shape)) for b in kernel.scratch}
    memo: dict[Node, Node] = {}

    def leaf(ld: Node) -> Node | None:
        name = ld.attr.buffer
        if not ld.attr.index and name.startswith(REDUCED):
            return None
        flat = flat_index(ld.attr.index, tiles.get(name) or layouts[name])
        return Node("load", ld.args, ld.dtype, LoadAt(name, (flat,)))

    def node(n: Node) -> Node:
        return rebuild(n, leaf, {}, memo)

    def place(e: Expr) -> Expr:
        def on_value(v: Val) -> Expr:
            return indirect(node(v.node), v.lo, v.hi)

        return e.subst({}, on_value)

    phases = []
    for phase in kernel.phases:
        body = []
        for st in phase.body:
            if isinstance(st, Reduce):
                body.append(FlatStatement(st, node(st.value)))
            else:
                layout = tiles.get(st.buffer) or layouts[st.buffer]
                mask = node(st.mask) if isinstance(st, Store) and st.mask is not None else None
                body.append(FlatStatement(st, node(st.value), place(flat_index(st.index, layout)), mask))
        phases.append(FlatPhase(phase.inner, tuple(body)))
    return coalesce(FlatKernel(kernel, kernel.outer, tuple(phases)))


def expressions(fk: FlatKernel, phase: FlatPhase | None = None) -> list[Expr]:
    """Every index expression of the kernel (or of one phase), also those of coordinates used as values."""
    found: dict[Expr, None] = {}
    statements = [st for p in ((phase,) if phase is not None else fk.phases) for st in p.body]
    found.update((st.where, None) for st in statements if st.where is not None)
    for n in walk_all(root for st in statements for root in (st.value, st.mask) if root is not None):
        if n.op == "load":
            found.update((e, None) for e in n.attr.index)
        elif n.op == "index":
            found[n.attr] = None
    return list(found)


def coalesce(fk: FlatKernel) -> FlatKernel:
    """Merge neighbouring loops that every index walks through as one."""
    changed = True
    while changed:
        changed = False
        for k in range(len(fk.outer) - 1):
            if _mergeable(fk.outer[k], fk.outer[k + 1], expressions(fk)):
                fk = _merge_pair(fk, fk.outer[k], fk.outer[k + 1])
                changed = True
                break
        for phase in fk.phases:
            for k in range(len(phase.inner) - 1):
                a, b = phase.inner[k], phase.inner[k + 1]
                users = [p for p in fk.phases if a in p.inner or b in p.inner]
                adjacent = all(_adjacent(p.inner, a, b) for p in users)
                if adjacent and all(_mergeable(a, b, expressions(fk, p)) for p in users):
                    fk = _merge_pair(fk, a, b)
                    changed = True
                    break
            if changed:
                break
    return fk


def _adjacent(inner: tuple[Var, ...], a: Var, b: Var) -> bool:
    return a in inner and b in inner and inner.index(b) == inner.index(a) + 1


def _mergeable(a: Var, b: Var, exprs: list[Expr]) -> bool:
    for e in exprs:
        ca, cb = e.coefficient(a), e.coefficient(b)
        if ca is None or cb is None or ca is not cb * b.extent:
            return False
    return True


def _merge_pair(fk: FlatKernel, a: Var, b: Var) -> FlatKernel:
    total = a.extent * b.extent
    merged = Var(f"{a.name}_{b.name}" if len(a.name) < 12 else f"{a.name}x", total)
    return substitute(fk, {a: expr(0), b: of(merged)}, {a: (), b: (merged,)})


def substitute(fk: FlatKernel, mapping: dict, loops: dict[Var, tuple[Var, ...]]) -> FlatKernel:
    """Replace loop variables in all indices, and in the loops themselves as `loops` says."""
    memo: dict[Node, Node] = {}

    def node(n: Node) -> Node:
        return rebuild(n, lambda _: None, mapping, memo)

    def place(e: Expr) -> Expr:
        def on_value(v: Val) -> Expr:
            return indirect(node(v.node), v.lo, v.hi)

        return e.subst(mapping, on_value)

    def vars_(old: tuple[Var, ...]) -> tuple[Var, ...]:
        return tuple(x for v in old for x in loops.get(v, (v,)))

    phases = tuple(
        FlatPhase(
            vars_(p.inner),
            tuple(
                replace(
                    s,
                    value=node(s.value),
                    where=None if s.where is None else place(s.where),
                    mask=None if s.mask is None else node(s.mask),
                )
                for s in p.body
            ),
        )
        for p in fk.phases
    )
    return replace(fk, outer=vars_(fk.outer), phases=phases)


# -- vectorization -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Lanes:
    """mode "outer": the outer variable `var` runs over lanes in every phase; "inner": each phase uses its own innermost variable;
    "none": scalar code."""

    mode: str
    var: Var | None = None


def choose_lanes(fk: FlatKernel, lanes: int) -> Lanes:
    inner_phases = [p for p in fk.phases if p.inner]
    best_outer = max(
        ((score(fk.phases, v), _extent_ok(v, lanes), -k, v) for k, v in enumerate(reversed(fk.outer))),
        key=lambda t: (t[1], t[0], t[2]),
        default=None,
    )
    if not inner_phases:
        return Lanes("outer", best_outer[3]) if best_outer is not None else Lanes("none")
    # A phase with a scan runs in order along its inner variable: lanes must be elsewhere.
    inner_total = 0.0
    short = False
    for p in inner_phases:
        v = best_inner(p)
        inner_total += score((p,), v)
        short = short or not _extent_ok(v, lanes)
        if any(isinstance(s.source, Scan) for s in p.body):
            inner_total -= 4
    if fk.kernel.serial:
        return Lanes("inner")
    if best_outer is not None and best_outer[1] and (best_outer[0] > inner_total or short):
        return Lanes("outer", best_outer[3])
    return Lanes("inner")


def best_inner(phase: FlatPhase) -> Var:
    """The innermost loop of a phase: fixed by order where order has a meaning, else the variable with the most unit strides."""
    if any(
        isinstance(s.source, Scan) or (isinstance(s.source, Reduce) and s.source.kind.startswith("arg"))
        for s in phase.body
    ):
        return phase.inner[-1]
    if any(isinstance(s.source, Store) and s.source.atomic for s in phase.body):
        return phase.inner[-1]
    return max(enumerate(phase.inner), key=lambda kv: (score((phase,), kv[1]), kv[0]))[1]


def _extent_ok(v: Var, lanes: int) -> bool:
    return not isinstance(v.extent, int) or v.extent >= lanes


def score(phases: tuple[FlatPhase, ...] | list[FlatPhase], v: Var) -> float:
    """Unit-stride accesses count for, strided and irregular ones against."""
    total = 0.0
    for p in phases:
        seen: set[tuple[str, Expr]] = set()
        for st in p.body:
            accesses = [(n.attr.buffer, n.attr.index[0]) for n in st.value.loads() if n.attr.index]
            if st.where is not None:
                assert not isinstance(st.source, Reduce)
                accesses.append((st.source.buffer, st.where))
            for key in accesses:
                if key in seen:
                    continue
                seen.add(key)
                c = key[1].coefficient(v)
                if c is None:
                    total -= 2
                elif c == 1:
                    total += 1 if key[1] is not st.where else 1.5
                elif c != 0:
                    total -= 1
                elif key[1] is st.where:
                    total -= 2
    return total


__all__ = [
    "FlatKernel",
    "FlatPhase",
    "FlatStatement",
    "Lanes",
    "Phase",
    "best_inner",
    "choose_lanes",
    "expressions",
    "flatten",
    "score",
]
