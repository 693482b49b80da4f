"""Products of matrices whose operands, or whose results, have something to compute beside them (`tile/contraction.py`), as Triton.

A program computes blocks of rows by columns, step by step along that loop, with the matrix units, which add up in float32. The
left factor is a function of a block of rows, the right one of a block of columns, and what follows the sums is one of both: each is written
as a function of its own, by the same emitter as other kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir.index import Var
from ..ir.nodes import Buffer, Node, load
from ..ir.quote import comment_text
from ..kernels.operands import count
from ..kernels.plan import Kernel
from ..kernels.steps import flat_index
from ..tile.contraction import Product
from .triton_values import TYPES, Scope, Values, steps, steps_there


def render_product(
    found: Product, kernel: Kernel, layouts: Mapping[str, Buffer], name: str, int64_index: bool
) -> list[str]:
    """The functions of a kernel: its factors, its end, and the one that is launched; without imports."""
    return _Renderer(found, kernel, layouts, name, int64_index).render()


class _Renderer:
    def __init__(
        self, found: Product, kernel: Kernel, layouts: Mapping[str, Buffer], name: str, int64_index: bool
    ) -> None:
        self.found, self.kernel, self.layouts, self.name, self.int64_index = found, kernel, layouts, name, int64_index
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
        v = Values(self.layouts, Scope(lines), Scope(lines), True, self.int64_index)
        v.inner, v.inner_mask, v.uniform = frozenset(inner), "rmask0", frozenset(self.found.batch)
        v.across, v.along, v.loops = outer, inner, ()
        digits: list[str] = []
        for loops, index in ((self.found.batch, "batch"), (outer, "xindex"), (inner, "rindex0")):
            step = 1
            for k, loop in reversed(list(enumerate(loops))):
                n = count((loop,))
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
            lines.append(f"if {count(self.found.along)} % RBLOCK != 0:")
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
            v.inner_tiles.add(s.register)
        stores: list[str] = []
        for st in f.epilogue:
            where = v.expr(flat_index(st.index, self.layouts[st.buffer]))
            dtype, value, block = self.layouts[st.buffer].dtype, v.node(st.value), "[XBLOCK, RBLOCK]"
            v.inner_scope.names[load(st.buffer, st.index, dtype)] = value
            typed = f"({value}).to({'tl.int8' if dtype == 'bool' else TYPES[dtype]})"
            place = f"tl.broadcast_to(xindex * 0 + {where}, {block})"
            if f.alignment is not None:
                # What the compiler cannot see: all rows of a block begin at a whole vector.
                place = f"tl.multiple_of({place}, [1, {f.alignment.vector}])"
            place = f"{st.buffer} + {place}"
            stores.append(f"tl.store({place}, tl.broadcast_to({typed}, {block}), xmask & rmask0)")
        # What is read may be in the memory that is written, and then at the same point: all threads have read theirs.
        body = [*digits, *v.constants, *lines, "tl.debug_barrier()", *stores]
        return [*self._head("end", [s.register for s in f.sums]), *(f"    {line}" for line in body)]

    def _kernel(self) -> list[str]:
        f = self.found
        rows, columns, along = count(f.rows), count(f.columns), count(f.along)
        blocks_of_rows = f.blocks
        long = ".to(tl.int64)" if self.int64_index else ""
        given = ", ".join(self.buffers)
        sums = [s.register for s in f.sums]
        body = [
            f"# {comment_text(', '.join(self.kernel.origins))}",
            f"ROWS: tl.constexpr = {f.block}",
            f"blocks: tl.constexpr = {f.width} // XBLOCK",
            f"program = tl.program_id(0) % ({blocks_of_rows} * blocks)",
            f"batch = (tl.program_id(0) // ({blocks_of_rows} * blocks)){long}",
        ]
        if blocks_of_rows == 1:
            body += ["row = 0", "column = program"]
        else:
            group = f.sizes.group_m if f.alignment is None else f.sizes.wide_group_m
            body += [
                f"first_row = program // ({group} * blocks) * {group}",
                f"group_size = min({blocks_of_rows} - first_row, {group})",
                f"row = first_row + program % ({group} * blocks) % group_size",
                f"column = program % ({group} * blocks) // group_size",
            ]
        if f.alignment is None:
            body += [
                f"lindex = (row * ROWS + tl.arange(0, ROWS)[:, None]){long}",
                f"lmask = lindex < {rows}",
                f"cindex = (column * XBLOCK + tl.arange(0, XBLOCK)){long}",
                f"cmask = cindex < {columns}",
            ]
        else:
            groups = f.alignment.count
            body += [
                f"first = column * XBLOCK - ((row % {groups}) * {f.alignment.line}) % {f.alignment.vector}",
                f"lindex = ((row // {groups} * ROWS + tl.arange(0, ROWS)[:, None]) * {groups} + row % {groups}){long}",
                f"lmask = lindex < {rows}",
                f"cindex = (first + tl.arange(0, XBLOCK)){long}",
                f"cmask = (cindex >= 0) & (cindex < {columns})",
            ]
        body += [
            *(f"{s} = tl.zeros([ROWS, XBLOCK], tl.float32)" for s in sums),
            f"for roffset in tl.range(0, {along}, RBLOCK, num_stages={f.sizes.num_stages}):",
        ]
        step = "batch, {0}index{1}, {0}mask{1}, rindex0, rmask0, {2}, RBLOCK"
        lefts, rights = [f"left{k}" for k in range(len(sums))], [f"right{k}" for k in range(len(sums))]
        inside = [
            f"rindex0 = {steps(self.int64_index, 'roffset')}",
            f"rmask0 = {steps_there(0, str(along), False)}",
            f"{', '.join(lefts)} = {self.name}_left({given}, {step.format('l', '', 'ROWS')})",
            f"{', '.join(rights)} = {self.name}_right({given}, {step.format('c', '[:, None]', 'XBLOCK')})",
            *(f"{s} = tp.dot({a}, tl.trans({b}), {s})" for s, a, b in zip(sums, lefts, rights, strict=True)),
        ]
        body += [f"    {line}" for line in inside]
        end = f"{self.name}_end({given}, batch, lindex, lmask, cindex[None, :], {{}}, {', '.join(sums)}, ROWS, XBLOCK)"
        if f.alignment is None:
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


__all__ = ["render_product"]
