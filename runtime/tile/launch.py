"""How a Triton kernel is launched: how many points its programs share, and whether their rows fit into registers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd

from ..ir.index import Expr, Val, product
from ..ir.nodes import ITEMSIZE, Buffer, Node, Size, contiguous_strides
from ..ir.work import cost, nodes_cost
from ..kernels.operands import count
from ..kernels.plan import Kernel, Phase, Reduce, Scan
from ..kernels.steps import flat_index
from ..machine import Gpu
from .attention import attention_of, points, widest
from .contraction import contraction
from .fused import fused_kernel, points_of
from .passes import merge_passes
from .scratch import roots
from .transpose import transpose_tiled

GATHERED = 64  # rows that are added up one after another: of more the sum would be less accurate than eager's


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: `ceil(outer / XBLOCK)` programs; RBLOCK is at least `inner` if persistent, else any power of two.

    outer_reduction   whether neighbours in memory are neighbours along the outer loops.
    passes            phases that have inner loops.
    transpose         whether a block's dimensions are tiles of two loops.
    bytes             of the smallest elements that are read or written at all points.
    strided           whether neighbouring points of the last outer loop read elements that are not neighbours.
    row               bytes that a program reads of rows along its inner loops, of so many buffers (`rows`).
    even              a power of two: in blocks of so many steps, or of a divisor, what moves with slow inner loops only is one element (0: any).
    sums              whether nothing is stored along inner loops.
    loads             elements of one buffer that a point reads, at most.
    cost              of what is computed at a point, in additions.
    product           rows of a block of a product of matrices: XBLOCK are its columns, and RBLOCK the steps of a sum at a time.
    alignment_groups  whether rows of a product that begin at the same place of a vector share a block.
    attention         two products around a softmax: XBLOCK are rows, RBLOCK the columns at a time; `product` is the elements of an operand's row.
    gathers           whether it adds up rows at places that the inner loop reads (an embedding's): neighbours along the outer loops read one place.
    tile              XBLOCK, RBLOCK and warps, if the plan decides them.
    """

    gpu: Gpu
    outer: Size
    inner: Size
    persistent: bool
    outer_reduction: bool = False
    passes: int = 1
    transpose: bool = False
    bytes: int = 4
    strided: bool = False
    row: int = 0
    rows: int = 0
    even: int = 0
    sums: bool = False
    loads: int = 1
    cost: float = 0
    product: int = 0
    alignment_groups: bool = False
    attention: bool = False
    gathers: bool = False
    tile: tuple[int, int, int] | None = None


def launch(kernel: Kernel, layouts: Mapping[str, Buffer]) -> Launch:
    """The launch of a kernel. It is persistent if the rows of a program fit into registers, unless it is an outer reduction that reads each element
    once: a loop is then as good.
    """
    if kernel.splits > 1:
        alone = launch(replace(kernel, splits=1), layouts)
        size = split_size(kernel.splits, alone.inner, kernel.gpu)
        return replace(alone, outer=product((alone.outer, kernel.splits)), inner=size, persistent=True)
    return _of_matrices(kernel, layouts) or _of_rows(kernel, layouts)


def _of_matrices(kernel: Kernel, layouts: Mapping[str, Buffer]) -> Launch | None:
    """Of a product of matrices, attention, or a transpose; None for other kernels."""
    gpu = kernel.gpu
    if kernel.tile is not None:
        fused, tile = fused_kernel(kernel, layouts)
        shape = tile.block_n, tile.block_k, tile.num_warps
        return Launch(gpu, points_of(fused, tile), count((fused.depth,)), False, product=tile.block_m, tile=shape)
    if kernel.parts:
        found = attention_of(kernel, layouts)
        return Launch(
            gpu,
            points(found, gpu),
            product(v.extent for v in found.columns),
            False,
            product=widest(found, gpu),
            attention=True,
        )
    matrices = contraction(kernel, layouts)
    if matrices is not None:
        along, groups = product(v.extent for v in matrices.along), matrices.alignment is not None
        return Launch(gpu, matrices.points, along, False, product=matrices.block, alignment_groups=groups)
    tiled = transpose_tiled(kernel, layouts)
    if tiled is not None:
        part = product(v.extent for v in tiled.phases[0].inner)
        return Launch(gpu, product(v.extent for v in tiled.outer), part, True, transpose=True)
    return None


def _loops(kernel: Kernel, layouts: Mapping[str, Buffer], outer: bool) -> tuple[bool, bool, int]:
    """Whether a kernel is persistent, whether it gathers rows, and how many inner loops it has. `outer`: whether it is an outer reduction."""
    inners = [product(v.extent for v in p.inner) for p in kernel.phases]
    known = [n for n in inners if isinstance(n, int)]
    largest, loops, all_known = max(known, default=1), sum(n != 1 for n in inners), len(known) == len(inners)
    if outer and not kernel.grid_loop and loops == 1 and largest <= GATHERED and all_known and gathers(kernel, layouts):
        return False, True, loops
    column = kernel.gpu.budgets.column
    limit = column * (1 if loops < 2 else 4) if outer else _row_budget(kernel)
    persistent = (all_known and largest <= limit) or bool(kernel.grid_loop)
    if outer and loops > 1 and largest > kernel.gpu.budgets.short_column and not kernel.grid_loop:
        # A loop that reads each element once waits for the memory less than a tile does whose sums wait for each other.
        persistent = persistent and _passes(kernel) > 1
    if persistent:
        return True, False, loops
    loops = _passes(kernel)
    fits = all_known and largest <= _long_row_budget(kernel.gpu) and not outer
    return fits and loops > 1 and _keeps_little(kernel, layouts), False, loops


def _of_rows(kernel: Kernel, layouts: Mapping[str, Buffer]) -> Launch:
    """Of other kernels: outer loops, with or without inner ones."""
    outer_reduction = is_outer_reduction(kernel, layouts)
    persistent, gathering, passes = _loops(kernel, layouts, outer_reduction)
    inners = [product(v.extent for v in p.inner) for p in kernel.phases]
    rows = [layouts[b].dtype for b in whole_rows(kernel) if b in layouts]
    outer = product(v.extent for v in kernel.outer if v not in kernel.grid_loop)
    inner = max((n for n in inners if isinstance(n, int)), default=1) if persistent else _largest(inners)
    met = product((outer, inner))
    sizes = {b: product(layouts[b].shape) for b in (*kernel.reads, *kernel.writes)}
    large = [b for b, n in sizes.items() if not isinstance(n, int) or not isinstance(met, int) or 2 * n > met]
    least = min((ITEMSIZE[layouts[b].dtype] for b in large), default=4)
    row = sum(ITEMSIZE[d] for d in rows) * inner if isinstance(inner, int) else 1 << 30
    one = inner == 1 and strided(kernel, layouts)
    sums = all(
        isinstance(st, Reduce) for p in kernel.phases if product(v.extent for v in p.inner) != 1 for st in p.body
    )
    met_at_once = (Counter(ld.attr.buffer for ld in _loads(p)) for p in kernel.phases)
    return Launch(
        kernel.gpu,
        outer,
        inner,
        persistent,
        outer_reduction,
        passes,
        bytes=least,
        strided=one,
        row=row,
        rows=len(rows),
        even=_even(kernel),
        sums=sums,
        loads=max((n for counts in met_at_once for n in counts.values()), default=0),
        cost=max(map(_cost, kernel.phases), default=0),
        gathers=gathering,
    )


def _row_budget(kernel: Kernel) -> int:
    """Steps along memory that a tile may hold in registers."""
    return kernel.gpu.budgets.row // max(1, len(set().union(*map(row_reads, kernel.phases))) // 2)


def _long_row_budget(gpu: Gpu) -> int:
    """The same for rows of one buffer, where a loop would read them again."""
    return 2 * gpu.budgets.row


def register_budget(kernel: Kernel, layouts: Mapping[str, Buffer]) -> int:
    """The same for rows that a kernel reads more than once."""
    return _long_row_budget(kernel.gpu) if _keeps_little(kernel, layouts) else _row_budget(kernel)


def split_size(splits: int, inner: Size, gpu: Gpu) -> int:
    """Steps of each split of a row: so many that all splits begin at whole lines of memory (of float32)."""
    assert isinstance(inner, int)
    whole = gpu.limits.line // ITEMSIZE["float32"]
    return -(-inner // (splits * whole)) * whole


def _passes(kernel: Kernel) -> int:
    """Loops that are left where reductions keep up with each other."""
    return sum(product(v.extent for v in p.inner) != 1 for p in merge_passes(kernel).phases)


def needs_int64_index(kernel: Kernel, layouts: Mapping[str, Buffer], shape: Launch) -> bool:
    """Whether coordinates may need 64 bits."""
    total = product(v.extent for v in kernel.outer)
    if not isinstance(total, int) or isinstance(shape.inner, Expr) or max(total, shape.inner) >= 1 << 31:
        return True
    for b in (*kernel.reads, *kernel.writes):
        layout = layouts[b]
        span: Size = layout.offset
        for n, s in zip(layout.shape, layout.stride or contiguous_strides(layout.shape), strict=True):
            span = span + n * s
        if isinstance(span, Expr) or span >= 1 << 31:
            return True
    return False


def is_outer_reduction(kernel: Kernel, layouts: Mapping[str, Buffer]) -> bool:
    """Whether neighbours in memory are neighbours along the outer loops, not along the inner ones (sums over columns)."""
    if not kernel.outer:
        return False
    votes = 0  # weighted by the elements that a load reads
    for phase in kernel.phases:
        for ld in _loads(phase):
            if ld.attr.buffer not in layouts or ld.vars().isdisjoint(phase.inner):
                continue
            met = product(v.extent for v in ld.vars())
            place = flat_index(ld.attr.index, layouts[ld.attr.buffer])
            inner = place.coefficient(phase.inner[-1])
            outer = place.coefficient(kernel.outer[-1])
            weight = met if isinstance(met, int) else 1 << 30
            votes += weight * ((outer is not None and outer == 1) - (inner is not None and inner == 1))
    return votes > 0


def gathers(kernel: Kernel, layouts: Mapping[str, Buffer]) -> bool:
    """Whether a reduction reads rows at places that data brings: one row for each step, and the last outer loop goes along a row."""
    for phase in kernel.phases:
        if not phase.inner or not all(isinstance(st, Reduce) for st in phase.body):
            continue
        for ld in _loads(phase):
            place = flat_index(ld.attr.index, layouts[ld.attr.buffer]) if ld.attr.buffer in layouts else None
            nodes = [a.node for a in place.atoms() if isinstance(a, Val)] if place is not None else []
            if nodes and place is not None and place.coefficient(kernel.outer[-1]) == 1:
                return any(n.mentions(phase.inner[-1]) for n in nodes)
    return False


def strided(kernel: Kernel, layouts: Mapping[str, Buffer]) -> bool:
    """Whether the last outer loop reads memory in steps of a few elements (windows, every other element)."""
    if not kernel.outer:
        return False
    for phase in kernel.phases:
        for ld in _loads(phase):
            if ld.attr.buffer in layouts:
                step = flat_index(ld.attr.index, layouts[ld.attr.buffer]).coefficient(kernel.outer[-1])
                if step is not None and step.is_const and abs(int(step)) > 1:
                    return True
    return False


def row_reads(phase: Phase) -> set[str]:
    """Buffers of which a program reads rows in a phase."""
    return {ld.attr.buffer for ld in _loads(phase) if not ld.vars().isdisjoint(phase.inner)}


def whole_rows(kernel: Kernel) -> set[str]:
    """Buffers of which a program reads an element at each point of a phase's inner loops."""
    found: set[str] = set()
    for phase in kernel.phases:
        loops = {v for v in phase.inner if v.extent != 1}
        found |= {ld.attr.buffer for ld in _loads(phase) if loops and loops <= ld.vars()}
    return found


def _keeps_little(kernel: Kernel, layouts: Mapping[str, Buffer]) -> bool:
    """Whether a program reads rows of its own of one buffer only, of 32 bits at most; all other rows are shared by all programs, and read in one
    phase.
    """
    rows = whole_rows(kernel)
    if kernel.scratch or any(isinstance(st, Scan) for p in kernel.phases for st in p.body):
        return False
    if any(row_reads(p) - rows for p in kernel.phases) or any(ITEMSIZE[layouts[b].dtype] > 4 for b in rows):
        return False
    own = {ld.attr.buffer for p in kernel.phases for ld in _loads(p) if not ld.vars().isdisjoint(kernel.outer)} & rows
    again = {b for b in rows if sum(b in row_reads(p) for p in kernel.phases) > 1}
    return len(own) == 1 and again <= own


def _even(kernel: Kernel) -> int:
    """Steps of a tile, at most, for which what moves with slow inner loops only is one element; 0: any."""
    found = 0
    for phase in kernel.phases:
        loops = [v for v in phase.inner if v.extent != 1]
        for ld in _loads(phase):
            met = [k for k, v in enumerate(loops) if v in ld.vars()]
            inside = product(v.extent for v in loops[met[-1] + 1 :]) if met else 1
            if isinstance(inside, int) and inside > 1:
                found = gcd(found, inside)
    return found & -found


def _loads(phase: Phase) -> set[Node]:
    return {ld for st in phase.body for root in roots(st) for ld in root.loads()}


def _cost(phase: Phase) -> float:
    return nodes_cost((root for st in phase.body for root in roots(st)), cost)


def _largest(sizes: list[Size]) -> Size:
    return next((n for n in sizes if isinstance(n, Expr)), max((n for n in sizes if isinstance(n, int)), default=1))


__all__ = [
    "Launch",
    "gathers",
    "is_outer_reduction",
    "launch",
    "needs_int64_index",
    "register_budget",
    "row_reads",
    "split_size",
    "strided",
]
