"""Kernels of points that are met in the order of memory: one loop, whatever the shape is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir.index import Atom, Expr, Quotient, Var, of, product
from ..ir.nodes import Buffer, Node, Size
from ..schedule.kernels import statement_nodes
from ..schedule.memory import flat_index
from ..schedule.plan import Kernel, Phase, Reduce, Statement
from .triton_tiles import changed


def collapsed(kernel: Kernel, layouts: Mapping[str, Buffer]) -> Kernel | None:
    """The kernel with a single outer loop, or None where an access or a value needs the coordinates along several."""
    live = [v for v in kernel.outer if v.extent != 1]
    if not live or kernel.walk or not is_points(kernel):
        return None
    rest: Size = product(v.extent for v in live)
    if rest == 0:
        return None
    whole = Var("o0", rest)
    left = of(whole)
    mapping: dict[Atom, int | Expr] = dict.fromkeys(kernel.outer, 0)
    for v in live:
        rest = rest // v.extent
        mapping[v] = left // rest
        left = left % rest
    phases = tuple(Phase(p.inner, tuple(changed(st, mapping, _keep) for st in p.body)) for p in kernel.phases)
    if any(_needs_digits(st, layouts) for p in phases for st in p.body):
        return None
    return replace(kernel, outer=(whole,), phases=phases)


def is_points(kernel: Kernel) -> bool:
    """Whether all loops are outer ones, with known extents."""
    return not (kernel.serial or kernel.scratch or kernel.symbols) and all(
        product(v.extent for v in p.inner) == 1 for p in kernel.phases
    )


def _needs_digits(st: Statement, layouts: Mapping[str, Buffer]) -> bool:
    if isinstance(st, Reduce):
        return True
    places = [flat_index(st.index, layouts[st.buffer])]
    for node in statement_nodes(st):
        for n in node.walk():
            if n.op == "load":
                places.append(flat_index(n.attr.index, layouts[n.attr.buffer]))
            elif n.op == "index":
                places.append(n.attr)
    return any(isinstance(a, Quotient) for place in places for a in place.atoms())


def _keep(_: Node) -> None:
    return None


__all__ = ["collapsed", "is_points"]
