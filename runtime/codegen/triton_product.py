"""Matrix products whose operands, or whose results, have something to compute beside them: sums along one loop of products of 16-bit values.

A program computes blocks of rows by columns, step by step along that loop, with the matrix units, which add up in float32. The
left factor is a function of a block of rows, the right one of a block of columns, and what follows the sums is one of both: each is written
as a function of its own, by the same emitter as other kernels.

Where the lines of what is stored are no whole vectors apart (an odd vocabulary), a block has rows that begin at the same place of a vector, and its
columns begin where a vector of theirs does (`Turns`): else each element is stored by itself, which takes as long as the sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..ir.index import Expr, Val, Var, of, product
from ..ir.nodes import ITEMSIZE, Buffer, Node, Size, load
from ..ir.quote import comment_text
from ..ir.work import cost, node_cost
from ..kernels.plan import Fold, Kernel, Reduce, Store
from ..kernels.steps import flat_index
from .triton_values import HALF, TYPES, VECTOR, Scope, Values, steps, steps_there

LEAST_COLUMNS, LEAST_STEPS = 16, 32  # below, a block of the matrix units is mostly empty
FEW_ROWS, MANY_ROWS = 16, 128  # of a block
EDGE, WIDE_EDGE = 128, 256  # columns: all blocks have a divisor of it, and where rows take turns of the other
NEAR, WIDE_NEAR = 8, 16  # blocks of rows that run side by side, so that the columns which they read are in the cache
STAGES = 4  # steps whose operands are on their way
MANY_COLUMNS = 4 * WIDE_EDGE  # of which all blocks but the ends of a row are stored in vectors
END = 6  # additions that what is stored of a sum may cost, where rows take turns


@dataclass(frozen=True)
class Factors:
    """One sum: its register, and what is multiplied (of a 16-bit dtype)."""

    register: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Turns:
    """Rows that begin at different places of a vector take turns: those of a block are `count` apart, and its columns begin `line * turn % vector`
    elements before a block's edge.

    count   rows after which a row begins at the same place again.
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

    turns  how rows are shared out, where each begins at another place of a vector.
    """

    batch: tuple[Var, ...]
    rows: tuple[Var, ...]
    columns: tuple[Var, ...]
    along: tuple[Var, ...]
    sums: tuple[Factors, ...]
    ends: tuple[Store, ...]
    turns: Turns | None = None

    @property
    def block(self) -> int:
        """Rows of a block; where they take turns there are enough for the largest."""
        rows = _count(self.rows)
        return FEW_ROWS if rows <= FEW_ROWS else min(MANY_ROWS, 1 << (rows - 1).bit_length())

    @property
    def blocks(self) -> int:
        """Blocks of rows."""
        turns = 1 if self.turns is None else self.turns.count
        return turns * -(-_count(self.rows) // (turns * self.block))

    @property
    def width(self) -> int:
        """Columns, in whole edges."""
        before, edge = (0, EDGE) if self.turns is None else (self.turns.most, WIDE_EDGE)
        return -(-(_count(self.columns) + before) // edge) * edge

    @property
    def points(self) -> int:
        """Columns of all blocks of rows, in whole edges: so many, divided by the columns of a block, are the programs."""
        return _count(self.batch) * self.blocks * self.width


def contraction(kernel: Kernel, layouts: Mapping[str, Buffer]) -> Product | None:
    """The kernel as a product of matrices, or None."""
    if kernel.serial or kernel.scratch or kernel.walk or kernel.symbols or not kernel.phases:
        return None
    first, *rest = kernel.phases
    along = tuple(v for v in first.inner if v.extent != 1)
    if not along or any(_size(p.inner) != 1 for p in rest):
        return None
    ends = [st for p in rest for st in p.body if isinstance(st, Store) and not isinstance(st, Fold)]
    if len(ends) < sum(len(p.body) for p in rest) or any(st.mode != "set" or st.mask is not None for st in ends):
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
    if not lefts or not rights or _count(rights) < LEAST_COLUMNS or _count(along) < LEAST_STEPS:
        return None
    registers = {f.register for f, _, _ in found}
    if not _known(ends, kernel) or not all(_is_rounded(st.value, registers) for st in ends):
        return None
    made = Product(both, lefts, rights, along, tuple(f for f, _, _ in found), tuple(ends))
    return replace(made, turns=_turns(made, layouts))


def _turns(found: Product, layouts: Mapping[str, Buffer]) -> Turns | None:
    """None where the rows of what is stored begin at the same place of a vector, or turns would not pay."""
    if not _pays(found):
        return None
    (st,) = found.ends
    vector = VECTOR // ITEMSIZE[layouts[st.buffer].dtype]
    line = _line(found, flat_index(st.index, layouts[st.buffer]), vector)
    if line is None:
        return None
    count = vector // math.gcd(line, vector)
    if count == 1 or _count(found.rows) < count * found.block:
        return None
    (column,) = found.columns
    loads = found.sums[0].right.loads()
    apart = [flat_index(ld.attr.index, layouts[ld.attr.buffer]).coefficient(column) for ld in loads]
    # Columns that are neighbours would be read from other places of a vector.
    return None if any(step in (None, 1) for step in apart) else Turns(count, line, vector)


def _pays(found: Product) -> bool:
    """Whether storing is what takes long: one sum, which is stored as it is or nearly so (registers have no room for more beside wide blocks), and so
    many columns that most blocks are whole.
    """
    if len(found.columns) != 1 or len(found.sums) != 1 or len(found.ends) != 1:
        return False
    (s,), (st,) = found.sums, found.ends
    alone = all(ld.attr.buffer == s.register for ld in st.value.loads())
    return alone and node_cost(st.value, cost, END) <= END and _count(found.columns) >= MANY_COLUMNS


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
        rest, step = rest - of(v) * int(c), step * _count((v,))
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


def _known(ends: Sequence[Store], kernel: Kernel) -> bool:
    """Whether what is read of the kernel's own results is what was stored before, at the same point, and all is stored at coordinates."""
    stored: set[tuple[str, tuple[Expr, ...]]] = set()
    for st in ends:
        own = [ld for ld in st.value.loads() if ld.attr.buffer in kernel.writes]
        if any(ld.args or (ld.attr.buffer, ld.attr.index) not in stored for ld in own):
            return False
        if any(isinstance(a, Val) for e in st.index for a in e.atoms()):
            return False
        stored.add((st.buffer, st.index))
    return True


def _size(loops: tuple[Var, ...]) -> Size:
    return product(v.extent for v in loops)


def _count(loops: tuple[Var, ...]) -> int:
    n = _size(loops)
    assert isinstance(n, int)
    return n


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


def render_product(found: Product, kernel: Kernel, layouts: Mapping[str, Buffer], name: str, wide: bool) -> list[str]:
    """The functions of a kernel: its factors, its end, and the one that is launched; without imports."""
    return _Renderer(found, kernel, layouts, name, wide).render()


class _Renderer:
    def __init__(self, found: Product, kernel: Kernel, layouts: Mapping[str, Buffer], name: str, wide: bool) -> None:
        self.found, self.kernel, self.layouts, self.name, self.wide = found, kernel, layouts, name, wide
        self.buffers = (*kernel.reads, *kernel.writes)

    def render(self) -> list[str]:
        f = self.found
        sides = [("left", f.rows, [s.left for s in f.sums]), ("right", f.columns, [s.right for s in f.sums])]
        lines: list[str] = []
        for side, loops, factors in sides:
            lines += [*self._function(side, loops, factors), "", ""]
        return [*lines, *self._end(), "", "", *self._kernel()]

    def _values(self, lines: list[str], outer: tuple[Var, ...], inner: tuple[Var, ...]) -> tuple[Values, list[str]]:
        """The emitter of a function over blocks of `outer` by `inner`, and the lines that make its loop variables."""
        v = Values(self.layouts, Scope(lines), Scope(lines), True, self.wide)
        v.inner, v.inner_mask, v.alike = frozenset(inner), "rmask0", frozenset(self.found.batch)
        v.across, v.along, v.loops = outer, inner, ()
        digits: list[str] = []
        for loops, index in ((self.found.batch, "batch"), (outer, "xindex"), (inner, "rindex0")):
            step = 1
            for k, loop in reversed(list(enumerate(loops))):
                n = _count((loop,))
                text = index if step == 1 else f"{index} // {step}"
                digits.append(f"{loop.name} = {text if k == 0 else f'({text}) % {n}'}")
                v.loop_names[loop] = loop.name
                step *= n
        return v, digits

    def _head(self, side: str, more: Sequence[str] = ()) -> list[str]:
        given = [*self.buffers, "batch", "xindex", "xmask", "rindex0", "rmask0", *more]
        return [
            "@triton.jit",
            f"def {self.name}_{side}({', '.join(given)}, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):",
        ]

    def _function(self, side: str, outer: tuple[Var, ...], factors: list[Node]) -> list[str]:
        """One side's factors for a block; 0 beyond the sum's steps."""
        lines: list[str] = []
        v, digits = self._values(lines, outer, self.found.along)
        results: list[str] = []
        for factor in factors:
            value = v.node(factor)
            made = v.fresh()
            lines.append(f"{made} = tl.broadcast_to({value}, [XBLOCK, RBLOCK]).to({TYPES[factor.dtype]})")
            lines.append(f"if {_count(self.found.along)} % RBLOCK != 0:")
            lines.append(f"    {made} = tl.where(rmask0, {made}, tl.zeros([XBLOCK, RBLOCK], {TYPES[factor.dtype]}))")
            results.append(made)
        body = [*digits, *v.constants, *lines, f"return {', '.join(results)}"]
        return [*self._head(side), *(f"    {line}" for line in body)]

    def _end(self) -> list[str]:
        f = self.found
        lines: list[str] = []
        v, digits = self._values(lines, f.rows, f.columns)
        for s in f.sums:
            v.local[s.register] = s.register
            v.deep_tiles.add(s.register)
        stores: list[str] = []
        for st in f.ends:
            where = v.expr(flat_index(st.index, self.layouts[st.buffer]))
            dtype, value, block = self.layouts[st.buffer].dtype, v.node(st.value), "[XBLOCK, RBLOCK]"
            v.deep.names[load(st.buffer, st.index, dtype)] = value
            typed = f"({value}).to({'tl.int8' if dtype == 'bool' else TYPES[dtype]})"
            place = f"tl.broadcast_to(xindex * 0 + {where}, {block})"
            if f.turns is not None:
                # What the compiler cannot see: all rows of a block begin at a whole vector.
                place = f"tl.multiple_of({place}, [1, {f.turns.vector}])"
            place = f"{st.buffer} + {place}"
            stores.append(f"tl.store({place}, tl.broadcast_to({typed}, {block}), xmask & rmask0)")
        # What is read may be in the memory that is written, and then at the same point: all threads have read theirs.
        body = [*digits, *v.constants, *lines, "tl.debug_barrier()", *stores]
        return [*self._head("end", [s.register for s in f.sums]), *(f"    {line}" for line in body)]

    def _kernel(self) -> list[str]:
        f = self.found
        rows, columns, count = _count(f.rows), _count(f.columns), _count(f.along)
        steps_of_rows = f.blocks
        long = ".to(tl.int64)" if self.wide else ""
        given = ", ".join(self.buffers)
        sums = [s.register for s in f.sums]
        body = [
            f"# {comment_text(', '.join(self.kernel.origins))}",
            f"ROWS: tl.constexpr = {f.block}",
            f"blocks: tl.constexpr = {f.width} // XBLOCK",
            f"program = tl.program_id(0) % ({steps_of_rows} * blocks)",
            f"batch = (tl.program_id(0) // ({steps_of_rows} * blocks)){long}",
        ]
        if steps_of_rows == 1:
            body += ["row = 0", "column = program"]
        else:
            near = NEAR if f.turns is None else WIDE_NEAR
            body += [
                f"near = program // ({near} * blocks) * {near}",
                f"side = min({steps_of_rows} - near, {near})",
                f"row = near + program % ({near} * blocks) % side",
                f"column = program % ({near} * blocks) // side",
            ]
        if f.turns is None:
            body += [
                f"lindex = (row * ROWS + tl.arange(0, ROWS)[:, None]){long}",
                f"lmask = lindex < {rows}",
                f"cindex = (column * XBLOCK + tl.arange(0, XBLOCK)){long}",
                f"cmask = cindex < {columns}",
            ]
        else:
            turns = f.turns.count
            body += [
                f"first = column * XBLOCK - ((row % {turns}) * {f.turns.line}) % {f.turns.vector}",
                f"lindex = ((row // {turns} * ROWS + tl.arange(0, ROWS)[:, None]) * {turns} + row % {turns}){long}",
                f"lmask = lindex < {rows}",
                f"cindex = (first + tl.arange(0, XBLOCK)){long}",
                f"cmask = (cindex >= 0) & (cindex < {columns})",
            ]
        body += [
            *(f"{s} = tl.zeros([ROWS, XBLOCK], tl.float32)" for s in sums),
            f"for roffset in tl.range(0, {count}, RBLOCK, num_stages={STAGES}):",
        ]
        step = "batch, {0}index{1}, {0}mask{1}, rindex0, rmask0, {2}, RBLOCK"
        lefts, rights = [f"left{k}" for k in range(len(sums))], [f"right{k}" for k in range(len(sums))]
        inside = [
            f"rindex0 = {steps(self.wide, 'roffset')}",
            f"rmask0 = {steps_there(0, str(count), False)}",
            f"{', '.join(lefts)} = {self.name}_left({given}, {step.format('l', '', 'ROWS')})",
            f"{', '.join(rights)} = {self.name}_right({given}, {step.format('c', '[:, None]', 'XBLOCK')})",
            *(f"{s} = tp.dot({a}, tl.trans({b}), {s})" for s, a, b in zip(sums, lefts, rights, strict=True)),
        ]
        body += [f"    {line}" for line in inside]
        end = f"{self.name}_end({given}, batch, lindex, lmask, cindex[None, :], {{}}, {', '.join(sums)}, ROWS, XBLOCK)"
        if f.turns is None:
            body.append(end.format("cmask[None, :]"))
        else:
            # A mask that does not change within a vector: whole vectors are stored.
            body += [
                f"if (first >= 0) & (first + XBLOCK <= {columns}):",
                f"    {end.format('tl.full([1, XBLOCK], True, tl.int1)')}",
                "else:",
                f"    {end.format('cmask[None, :]')}",
            ]
        taken = ", ".join([*self.buffers, "XBLOCK: tl.constexpr", "RBLOCK: tl.constexpr"])
        return ["@triton.jit", f"def {self.name}({taken}):", *(f"    {line}" for line in body)]


__all__ = ["LEAST_STEPS", "Product", "Turns", "contraction", "render_product"]
