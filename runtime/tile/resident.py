"""Rows that several loops of a kernel read: how much of them stays in registers until the next loop, and how the cache should evict the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...generated.tuning import Tuning
from ..ir.index import Expr, Val, Var, of, product
from ..ir.nodes import ITEMSIZE, Buffer, Node
from ..kernels.access import flat_of
from ..kernels.plan import Kernel, Statement
from ..kernels.steps import flat_index
from .blocks import blocks, rule_of
from .launch import Launch, row_reads
from .scratch import roots

UNROLLED = "tl.static_range"
TILES = 16  # of a row at most: where a loop is unrolled, its code is so many times as long

Body = tuple[int, tuple[Var, ...], tuple[Statement, ...]]
"""A phase of a kernel: the number of its loops, their variables, and its statements over these."""


@dataclass(frozen=True)
class ResidentRow:
    """A load of a row whose first `steps` stay in registers, as a tuple `tiles`; `first`: whether it is in the first loop that reads the row,
    which fills that tuple.
    """

    tiles: str
    steps: int
    first: bool


def eviction_policies(kernel: Kernel, at: int) -> dict[str, str]:
    """Triton's eviction policies for rows that several loops read, in phase number `at`: they stay in the cache until the last loop."""
    rows = [row_reads(p) for p in kernel.phases]
    before, after = set().union(*rows[:at]), set().union(*rows[at + 1 :])
    return {b: "evict_last" if b in after else "evict_first" for b in rows[at] if b in before or b in after}


def resident_rows(
    kernel: Kernel, bodies: Sequence[Body], layouts: Mapping[str, Buffer], shape: Launch, tuning: Tuning
) -> list[dict[Node, ResidentRow]]:
    """For each phase its loads of rows that stay in registers in part, within the table's budget; rows that are read latest come first."""
    found: list[dict[Node, ResidentRow]] = [{} for _ in bodies]
    if shape.persistent or shape.outer_reduction or shape.passes < 2 or shape.inner == 1 or kernel.grid_loop:
        return found
    budget, (x, r, _) = rule_of(shape, tuning).resident, blocks(shape, tuning)
    if not budget or x != 1 or not isinstance(shape.inner, int) or shape.inner > TILES * r:
        return found
    met: dict[tuple[str, Expr], list[tuple[int, Node]]] = {}
    for at, (_, loops, body) in enumerate(bodies):
        if product(v.extent for v in loops) != shape.inner:
            continue
        for ld in sorted({ld for st in body for root in roots(st) for ld in root.loads()}, key=lambda ld: ld.key):
            buffer = layouts.get(ld.attr.buffer)
            if buffer is None or buffer.name in kernel.writes or ld.args or buffer.dtype == "bool":
                continue
            place = _place(flat_index(ld.attr.index, buffer), loops, shape.inner)
            if place is not None:
                met.setdefault((buffer.name, place), []).append((at, ld))
    rows = [some for some in met.values() if some[0][0] < some[-1][0]]
    for number, some in enumerate(sorted(rows, key=lambda some: -some[0][0])):
        each = -(-ITEMSIZE[some[0][1].dtype] // shape.gpu.limits.register)
        steps = min(budget // each, -(-shape.inner // r) * r) // r * r
        budget -= steps * each
        for at, ld in some if steps else ():
            # Each tile is kept once: where the first loop also reads it by another view, that reads it from memory.
            if at > some[0][0] or ld is some[0][1]:
                found[at][ld] = ResidentRow(f"resident{number}", steps, at == some[0][0])
    return found


def _place(where: Expr, loops: Sequence[Var], inner: int) -> Expr | None:
    """The place by one index that counts the loops' steps in order; None where it does not go by that, or is brought by data."""
    position = flat_of(tuple(of(v) for v in loops), tuple(v.extent for v in loops))
    each = where.coefficient(loops[-1])
    if each is None or not each.is_const or each == 0 or any(isinstance(a, Val) for a in where.atoms()):
        return None
    rest = where - position * each
    return None if rest.atoms() & set(loops) else rest + of(Var("step", inner)) * each


__all__ = ["UNROLLED", "ResidentRow", "eviction_policies", "resident_rows"]
