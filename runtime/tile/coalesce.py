"""Loop coalescing: a pointwise kernel that goes through memory in order becomes one loop over flat buffers, whatever its shape is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir.index import Atom, Expr, Var, expr, of, product
from ..ir.nodes import Buffer, LoadAt, Node, contiguous_strides, rebuild
from ..kernels.plan import Kernel, Phase, Statement, Store
from ..kernels.steps import flat_index
from .scratch import changed

Layouts = Mapping[str, Buffer]


def coalesced(kernel: Kernel, layouts: Layouts) -> tuple[Kernel, Layouts] | None:
    """The kernel with a single outer loop, and its buffers' layouts; None if it needs the coordinates of several loops."""
    live = [v for v in kernel.outer if v.extent != 1]
    if not live or kernel.grid_loop or not is_pointwise_kernel(kernel):
        return None
    whole = Var("o0", product(v.extent for v in live))
    if len(live) == 1:
        named: dict[Atom, int | Expr] = {v: of(whole) if v is live[0] else 0 for v in kernel.outer}
        phases = tuple(Phase(p.inner, tuple(changed(st, named, _keep) for st in p.body)) for p in kernel.phases)
        return replace(kernel, outer=(whole,), phases=phases), layouts
    point = expr(0)
    for v, s in zip(live, contiguous_strides(tuple(v.extent for v in live)), strict=True):
        point = point + of(v) * s
    flat = _Flat(layouts, point, of(whole))
    try:
        phases = tuple(Phase(p.inner, tuple(flat.statement(st) for st in p.body)) for p in kernel.phases)
    except _CoordinatesNeededError:
        return None
    buffers = {name: layouts[name] for name in (*kernel.reads, *kernel.writes)}
    lines = {n: replace(b, shape=(product(b.shape),), stride=(1,)) for n, b in buffers.items()}
    return replace(kernel, outer=(whole,), phases=phases), lines


def is_pointwise_kernel(kernel: Kernel) -> bool:
    """Whether all loops are outer ones, and no size is a symbol."""
    return not (kernel.serial or kernel.scratch or kernel.symbols or kernel.parts) and all(
        product(v.extent for v in p.inner) == 1 for p in kernel.phases
    )


class _CoordinatesNeededError(Exception):
    pass


class _Flat:
    """Statements over one loop. point: where the others are, in row-major order, which is `whole`."""

    def __init__(self, layouts: Layouts, point: Expr, whole: Expr) -> None:
        self.layouts, self.point, self.whole = layouts, point, whole
        self.memo: dict[Node, Node] = {}

    def statement(self, st: Statement) -> Statement:
        if not isinstance(st, Store):
            raise _CoordinatesNeededError
        mask = None if st.mask is None else self.node(st.mask)
        return replace(st, value=self.node(st.value), index=(self.place(st.buffer, st.index),), mask=mask)

    def node(self, root: Node) -> Node:
        if any(n.op == "index" and n.vars() for n in root.walk()):
            raise _CoordinatesNeededError
        return rebuild(root, self.load, {}, self.memo)

    def load(self, n: Node) -> Node:
        return Node("load", n.args, n.dtype, LoadAt(n.attr.buffer, (self.place(n.attr.buffer, n.attr.index),)))

    def place(self, buffer: str, index: tuple[Expr, ...]) -> Expr:
        where = flat_index(index, self.layouts[buffer]) - self.layouts[buffer].offset
        for start, moved in ((where, expr(0)), (where - self.point, self.whole)):
            if start.is_const:
                return start + moved
        raise _CoordinatesNeededError


def _keep(_: Node) -> None:
    return None


__all__ = ["coalesced", "is_pointwise_kernel"]
