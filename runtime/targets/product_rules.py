"""Which products of matrices are one kernel with what is after them without being measured: where the table of this very architecture says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...generated.tuning import FusedProduct
from ..fuse.products import Fused, Selector
from ..ir.nodes import Buffer
from ..ir.work import cost, node_cost
from ..kernels.operands import Layouts, count
from ..kernels.plan import ExternStep, Kernel, Tile
from ..kernels.steps import flat_index
from ..machine import tuning_of
from ..tile.fused import are_odd, described_operands, fused_kernel
from .products import tile_of


def by_table(capability: int) -> Selector | None:
    """`Selector` by the table of a GPU (by its compute capability, times ten); None where it was measured on another."""
    table = tuning_of(capability)
    if table.capability != capability or not table.fused:
        return None

    def choose(kernels: Sequence[Kernel], layouts: Layouts) -> list[tuple[float, Tile] | None]:
        return [_choice(table.fused, kernel, layouts) for kernel in kernels]

    return choose


def _choice(rules: Sequence[FusedProduct], kernel: Kernel, layouts: Layouts) -> tuple[float, Tile] | None:
    """The tile of the first rule that holds. What is gained is not known: as much by any of these."""
    if not isinstance(kernel.parts[0], ExternStep):
        return None  # what operands are made of
    found, _ = fused_kernel(replace(kernel, tile=Tile(16, 16, 16, 1, 1)), layouts)
    left, right = described_operands(found, layouts, kernel.gpu)
    aligned = left is not None and right is not None and left.along
    odd = are_odd(found, layouts, kernel.gpu)
    if not (aligned or odd) or not _is_in_order(found, layouts):
        return None
    spent = sum(node_cost(st.value, cost) for st in found.epilogue)
    rows, columns, depth = (count((v,)) for v in (found.row, found.column, found.depth))
    elements = count(found.batch) * rows * columns
    for rule in rules:
        if (
            rule.odd == odd
            and (not rule.cost or spent <= rule.cost)
            and depth <= rule.depth
            and rule.least <= elements
            and (not rule.elements or elements <= rule.elements)
            and rule.block_m <= rows
            and rule.block_n <= columns
        ):
            return 1.0, tile_of(rule)
    return None


def _is_in_order(found: Fused, layouts: Mapping[str, Buffer]) -> bool:
    """Whether neighbours of a row of the product are neighbours, or one element, in all that is stored and read at the end."""
    known = {**layouts, **{b.name: b for b, _ in found.views}}
    places = [(st.buffer, st.index) for st in found.epilogue]
    loads = [ld for st in found.epilogue for ld in st.value.loads()] + (
        [] if found.addend is None else [*found.addend.loads()]
    )
    places += [(ld.attr.buffer, ld.attr.index) for ld in loads if ld.attr.buffer in known]
    for name, index in places:
        step = flat_index(index, known[name]).coefficient(found.column)
        if step is None or not step.is_const or int(step) not in (0, 1):
            return False
    return True


__all__ = ["by_table"]
