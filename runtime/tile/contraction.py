"""Which kernels are matrix products (sums of products of 16-bit values) with a prologue or an epilogue, and the sizes of their blocks.

If the lines of the result are no whole vectors apart (an odd vocabulary), rows form alignment groups: those of a block begin at the same place of a
vector, and its columns begin where a vector of theirs does. Otherwise each element would be stored by itself, which takes as long as the sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...generated.tuning import ContractionSizes
from ..ir.index import Expr, Val, Var, of, product
from ..ir.nodes import ITEMSIZE, Buffer, Node, Size
from ..ir.work import cost, node_cost
from ..kernels.operands import HALF, count
from ..kernels.plan import Accumulate, Kernel, Reduce, Store
from ..kernels.steps import flat_index
from ..machine import Gpu


@dataclass(frozen=True)
class Factors:
    """One sum: its register, and what is multiplied (of a 16-bit dtype)."""

    register: str
    left: Node
    right: Node


@dataclass(frozen=True)
class AlignmentGroups:
    """Rows that begin at the same place of a vector: those of a block are `count` apart, and its columns begin `line * group % vector` elements
    before a block's edge.

    count   groups: rows after which a row begins at the same place again.
    line    elements from one row to the next, beyond whole vectors.
    vector  elements.
    """

    count: int
    line: int
    vector: int

    @property
    def most(self) -> int:
        """Columns by which a block begins before its edge."""
        return max(self.line * k % self.vector for k in range(self.count))


@dataclass(frozen=True)
class Product:
    """The loops of a kernel by what depends on them: both factors, the left one, the right one; and the loops of the sum.

    sizes      of blocks.
    alignment  the groups of rows, if rows begin at different places of a vector.
    """

    batch: tuple[Var, ...]
    rows: tuple[Var, ...]
    columns: tuple[Var, ...]
    along: tuple[Var, ...]
    sums: tuple[Factors, ...]
    epilogue: tuple[Store, ...]
    sizes: ContractionSizes
    alignment: AlignmentGroups | None = None

    @property
    def block(self) -> int:
        """Rows of a block: a power of two, at most."""
        rows, few = count(self.rows), self.sizes.few_rows
        return few if rows <= few else min(self.sizes.rows, 1 << (rows - 1).bit_length())

    @property
    def blocks(self) -> int:
        """Blocks of rows."""
        groups = 1 if self.alignment is None else self.alignment.count
        return groups * -(-count(self.rows) // (groups * self.block))

    @property
    def width(self) -> int:
        """Columns, in whole edges."""
        before, edge = (0, self.sizes.edge) if self.alignment is None else (self.alignment.most, self.sizes.wide_edge)
        return -(-(count(self.columns) + before) // edge) * edge

    @property
    def points(self) -> int:
        """Columns of all blocks of rows, in whole edges: so many, divided by the columns of a block, are the programs."""
        return count(self.batch) * self.blocks * self.width


def contraction(kernel: Kernel, layouts: Mapping[str, Buffer]) -> Product | None:
    """The kernel as a product of matrices, or None."""
    if kernel.serial or kernel.scratch or kernel.grid_loop or kernel.symbols or not kernel.phases:
        return None
    first, *rest = kernel.phases
    along = tuple(v for v in first.inner if v.extent != 1)
    if not along or any(_size(p.inner) != 1 for p in rest):
        return None
    epilogue = [st for p in rest for st in p.body if isinstance(st, Store) and not isinstance(st, Accumulate)]
    if len(epilogue) < sum(len(p.body) for p in rest) or any(
        st.mode != "set" or st.mask is not None for st in epilogue
    ):
        return None
    sums = [_factors(st, kernel.outer) if isinstance(st, Reduce) else None for st in first.body]
    found = [s for s in sums if s is not None]
    if not found or len(found) < len(sums) or len({(l, r) for _, l, r in found}) > 1:
        return None
    _, left, right = found[0]
    live = tuple(v for v in kernel.outer if v.extent != 1)
    both, lefts, rights = (tuple(v for v in live if v in some) for some in (left & right, left - right, right - left))
    counts = [_size(loops) for loops in (both, lefts, rights, along)]
    if not all(isinstance(n, int) for n in counts) or len(both) + len(lefts) + len(rights) != len(live):
        return None
    mma = kernel.gpu.limits.mma
    if not lefts or not rights or count(rights) < mma.edge or count(along) < mma.steps:
        return None
    registers = {f.register for f, _, _ in found}
    if not _known(epilogue, kernel) or not all(_is_rounded(st.value, registers) for st in epilogue):
        return None
    made = Product(
        both, lefts, rights, along, tuple(f for f, _, _ in found), tuple(epilogue), kernel.gpu.tuning.contraction
    )
    return replace(made, alignment=_alignment_groups(made, layouts, kernel.gpu))


def _alignment_groups(found: Product, layouts: Mapping[str, Buffer], gpu: Gpu) -> AlignmentGroups | None:
    """None if the rows of the result begin at the same place of a vector, or groups would not pay."""
    if not _is_profitable(found):
        return None
    (st,) = found.epilogue
    vector = gpu.limits.vector // ITEMSIZE[layouts[st.buffer].dtype]
    line = _line(found, flat_index(st.index, layouts[st.buffer]), vector)
    if line is None:
        return None
    groups = vector // math.gcd(line, vector)
    if groups == 1 or count(found.rows) < groups * found.block:
        return None
    (column,) = found.columns
    loads = found.sums[0].right.loads()
    apart = [flat_index(ld.attr.index, layouts[ld.attr.buffer]).coefficient(column) for ld in loads]
    # Columns that are neighbours would be read from other places of a vector.
    return None if any(step in (None, 1) for step in apart) else AlignmentGroups(groups, line, vector)


def _is_profitable(found: Product) -> bool:
    """Whether storing is what takes long: one sum, which is stored as it is or nearly so (registers have no room for more beside wide blocks), and so
    many columns that most blocks are whole.
    """
    if len(found.columns) != 1 or len(found.sums) != 1 or len(found.epilogue) != 1:
        return False
    (s,), (st,), most = found.sums, found.epilogue, found.sizes.epilogue
    alone = all(ld.attr.buffer == s.register for ld in st.value.loads())
    return alone and node_cost(st.value, cost, most) <= most and count(found.columns) >= found.sizes.grouped_columns


def _line(found: Product, where: Expr, vector: int) -> int | None:
    """Elements from one row of a result to the next, beyond whole vectors, if each row is a line of neighbours, one after another from a whole vector
    on.
    """
    (column,) = found.columns
    if where.coefficient(column) != 1:
        return None
    rest, line, step = where - of(column), None, 1
    for v in reversed(found.rows):
        c = where.coefficient(v)
        if c is None or not c.is_const:
            return None
        line = int(c) if line is None else line
        if int(c) != line * step:
            return None
        rest, step = rest - of(v) * int(c), step * count((v,))
    if {*rest.atoms()} - {*found.batch} or any(c % vector for _, c in rest.terms):
        return None
    return None if line is None else line % vector


def _is_rounded(value: Node, registers: set[str]) -> bool:
    """Whether what is stored of the sums has 16 bits: matrix units add up less carefully than float32 operations one by one."""
    left, seen = [value], set[Node]()
    while left:
        n = left.pop()
        if n in seen or n.dtype in HALF:
            continue
        seen.add(n)
        if n.op == "load" and n.attr.buffer in registers:
            return False
        left += n.children()
    return True


def _known(epilogue: Sequence[Store], kernel: Kernel) -> bool:
    """Whether what is read of the kernel's own results is what was stored before, at the same point, and all is stored at coordinates."""
    stored: set[tuple[str, tuple[Expr, ...]]] = set()
    for st in epilogue:
        own = [ld for ld in st.value.loads() if ld.attr.buffer in kernel.writes]
        if any(ld.args or (ld.attr.buffer, ld.attr.index) not in stored for ld in own):
            return False
        if any(isinstance(a, Val) for e in st.index for a in e.atoms()):
            return False
        stored.add((st.buffer, st.index))
    return True


def _size(loops: tuple[Var, ...]) -> Size:
    return product(v.extent for v in loops)


def _factors(st: Reduce, outer: tuple[Var, ...]) -> tuple[Factors, frozenset[Var], frozenset[Var]] | None:
    """The factors of a sum, the one that the last loop of the kernel belongs to second, and the outer loops of each."""
    value = st.value
    if st.kind != "sum" or value.op != "mul" or (st.dtype, value.dtype) != ("float32", "float32") or not outer:
        return None
    if any(a.op != "to_dtype" or a.args[0].dtype not in HALF for a in value.args):
        return None
    one, other = (a.args[0] for a in value.args)
    if one.dtype != other.dtype:
        return None
    last = next((v for v in reversed(outer) if v.extent != 1), None)
    if last in one.vars():
        one, other = other, one
    live = {v for v in outer if v.extent != 1}
    return Factors(st.name, one, other), frozenset(one.vars() & live), frozenset(other.vars() & live)


__all__ = ["AlignmentGroups", "Product", "contraction"]
