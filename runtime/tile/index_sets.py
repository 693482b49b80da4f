"""Index-set splitting of pointwise kernels that choose by a coordinate (a concatenation): the loop is split into ranges in which all choices are
made, with a branch for each, if no block lies across two ranges. A program then computes, and reads, only what it stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from ..ir.fold import coordinate, fold
from ..ir.index import Atom, Expr, Var, of, product
from ..ir.nodes import Node, rebuild, walk_all
from ..kernels.plan import Kernel, Statement, Store
from .coalesce import is_pointwise_kernel
from .pieces import flip
from .scratch import changed, roots

MOST = 16  # branches


@dataclass(frozen=True)
class IndexSets:
    """A loop in ranges: where each ends, and its statements.

    step    points of the loops inside of the loop.
    extent  of the loop.
    """

    step: int
    extent: int
    ranges: tuple[tuple[int, tuple[Statement, ...]], ...]


def split_index_set(kernel: Kernel, block: int) -> IndexSets | None:
    """None if a block of so many points, or of a divisor of it, may still have to choose."""
    live = [v for v in kernel.outer if v.extent != 1]
    if not is_pointwise_kernel(kernel) or kernel.grid_loop or len(kernel.phases) != 1:
        return None
    body = kernel.phases[0].body
    if not all(isinstance(st, Store) and st.mode == "set" for st in body):
        return None
    step = 1
    for v in reversed(live):
        if not isinstance(v.extent, int):
            return None
        edges = [0, *_cuts(body, v), v.extent]
        if len(edges) > 2 and len(edges) <= MOST + 1 and all(e * step % block == 0 for e in edges):
            return IndexSets(step, v.extent, tuple((hi, _in_range(body, v, lo, hi)) for lo, hi in pairwise(edges)))
        step *= v.extent
    return None


def _cuts(body: tuple[Statement, ...], v: Var) -> list[int]:
    """Values of a loop at which some comparison flips."""
    found: set[int] = set()
    for n in walk_all(root for st in body for root in roots(st)):
        if n.op in ("lt", "le", "gt", "ge"):
            a, b = coordinate(n.args[0]), coordinate(n.args[1])
            cut = None if a is None or b is None else flip(a - b, v, n.op)
            if isinstance(cut, int) and 0 < cut < int(product((v.extent,))):
                found.add(cut)
    return sorted(found)


def _in_range(body: tuple[Statement, ...], v: Var, lo: int, hi: int) -> tuple[Statement, ...]:
    """The statements with the choices that lo <= v < hi makes."""
    part = Var(f"{v.name}p", hi - lo)
    there: dict[Atom, int | Expr] = {v: of(part) + lo}
    back: Mapping[Atom, int | Expr] = {part: of(v) - lo}
    memo: dict[Node, Node] = {}

    def chosen(n: Node) -> Node:
        return rebuild(fold(n, memo), lambda _: None, back)

    found: list[Statement] = []
    for st in body:
        moved = changed(st, there, lambda _: None)
        assert isinstance(moved, Store)
        same = changed(moved, back, lambda _: None)
        assert isinstance(same, Store)
        found.append(replace(same, value=chosen(moved.value), mask=None if moved.mask is None else chosen(moved.mask)))
    return tuple(found)


__all__ = ["IndexSets", "split_index_set"]
