"""A product of matrices with what its operands are made of and what is made of it, as one kernel (`fuse.products`).

A program computes a block of the result, some steps of the sums at a time; operands of later steps are on their way while the matrix units work on
one. Both operands and the end are functions of their own, written by the emitter of other kernels. The sums are rounded as the library's
result would be, so that what is made of them is the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..fuse.products import SUM, Fused
from ..ir.index import Var
from ..ir.nodes import Buffer, Node, load
from ..ir.quote import comment_text
from ..kernels.operands import count
from ..kernels.plan import Kernel, Tile
from ..kernels.steps import flat_index
from ..tile.approximate import approximate
from ..tile.fused import blocks_along, described_operands, fused_kernel
from .triton_functions import Functions
from .triton_values import TYPES

SIDES = ("left", "right")


def render_fused(kernel: Kernel, layouts: Mapping[str, Buffer], name: str, int64_index: bool) -> list[str]:
    """The functions of a kernel; without imports."""
    found, tile = fused_kernel(kernel, layouts)
    return _Renderer(found, tile, kernel, layouts, name, int64_index).render()


class _Renderer(Functions):
    def __init__(
        self, found: Fused, tile: Tile, kernel: Kernel, layouts: Mapping[str, Buffer], name: str, int64_index: bool
    ) -> None:
        super().__init__(kernel, layouts, name, int64_index, found.batch, found.views)
        self.found, self.tile = found, tile
        self.described = described_operands(found, layouts, kernel.gpu) if tile.descriptors else (None, None)

    def render(self) -> list[str]:
        f = self.found
        lines: list[str] = []
        for side, v, value, described in (
            ("left", f.row, f.left, self.described[0]),
            ("right", f.column, f.right, self.described[1]),
        ):
            lines += [*self._operand(side, v, value), "", ""] if described is None else []
        return [*lines, *self._end(), "", "", *self._kernel()]

    def _operand(self, side: str, outer: Var, value: Node) -> list[str]:
        """A block of an operand; 0 beyond the steps of the sums."""
        if value.op == "load":
            return self.operand(side, (outer,), (self.found.depth,), value)
        lines: list[str] = []
        v, digits = self.values(lines, (outer,), (self.found.depth,))
        dtype = TYPES[value.dtype]
        made = f"tl.broadcast_to({v.node(value)}, [XBLOCK, RBLOCK]).to({dtype})"
        if count((self.found.depth,)) % self.tile.block_k:
            made = f"tl.where(rmask0, {made}, tl.zeros([XBLOCK, RBLOCK], {dtype}))"
        lines.append(f"return {made}")
        return self.function(side, v, lines, digits)

    def _end(self) -> list[str]:
        """What is stored of a block of sums."""
        f = self.found
        lines: list[str] = []
        v, digits = self.values(lines, (f.row,), (f.column,))
        v.approximate = approximate(f.epilogue)
        if f.addend is not None:
            lines.append(f"{SUM} = {SUM} + ({v.node(f.addend)}).to(tl.float32)")
        lines.append(f"{SUM} = tp.to_dtype({SUM}, {TYPES[f.dtype]})")
        v.local[SUM] = SUM
        v.inner_tiles.add(SUM)
        stores: list[str] = []
        for st in f.epilogue:
            where = v.expr(flat_index(st.index, self.layouts[st.buffer]))
            dtype, value, block = self.layouts[st.buffer].dtype, v.node(st.value), "[XBLOCK, RBLOCK]"
            v.inner_scope.names.setdefault(load(st.buffer, st.index, dtype), value)
            typed = f"({value}).to({'tl.int8' if dtype == 'bool' else TYPES[dtype]})"
            place = f"{st.buffer} + tl.broadcast_to(xindex * 0 + {where}, {block})"
            stores.append(f"tl.store({place}, tl.broadcast_to({typed}, {block}), xmask & rmask0)")
        return self.function("end", v, [*lines, *stores], digits, SUM)

    # -- the kernel ----------------------------------------------------------------------------------------------------
    def _kernel(self) -> list[str]:
        f, tile = self.found, self.tile
        given, rows = ", ".join(self.buffers), blocks_along(f.row, tile.block_m)
        blocks = f"{blocks_along(f.column, tile.block_n) * tile.block_n} // XBLOCK"
        body = [
            f"# {comment_text(', '.join(self.kernel.origins))}",
            f"ROWS: tl.constexpr = {tile.block_m}",
            f"blocks: tl.constexpr = {blocks}",
            f"program = tl.program_id(0) % ({rows} * blocks)",
            f"batch = (tl.program_id(0) // ({rows} * blocks)){self.long}",
        ]
        if rows == 1:
            body += ["row = 0", "column = program"]
        else:
            body += [
                f"first_row = program // ({tile.group_m} * blocks) * {tile.group_m}",
                f"group_size = min({rows} - first_row, {tile.group_m})",
                f"row = first_row + program % ({tile.group_m} * blocks) % group_size",
                f"column = program % ({tile.group_m} * blocks) // group_size",
            ]
        depth = count((f.depth,))
        body += [
            f"xindex = (row * ROWS + tl.arange(0, ROWS)[:, None]){self.long}",
            f"xmask = {self._there('xindex', f.row, 'ROWS', '[ROWS, 1]')}",
            f"cindex = (column * XBLOCK + tl.arange(0, XBLOCK)){self.long}",
            f"cmask = {self._there('cindex', f.column, 'XBLOCK', '[XBLOCK]')}",
            "sums = tl.zeros([ROWS, XBLOCK], tl.float32)",
            *(
                line
                for k, (v, block) in enumerate(((f.row, "ROWS"), (f.column, "XBLOCK")))
                for line in self._descriptor(k, v, block)
            ),
            f"for roffset in tl.range(0, {depth}, RBLOCK, num_stages={tile.num_stages}):",
        ]
        inside = [
            f"dindex = (roffset + tl.arange(0, RBLOCK)[None, :]){self.long}",
            f"dmask = {self._there('dindex', f.depth, 'RBLOCK', '[1, RBLOCK]')}",
            self._block(0, "row * ROWS")
            or f"left = {self.name}_left({given}, batch, xindex, xmask, dindex, dmask, ROWS, RBLOCK)",
            self._block(1, "column * XBLOCK")
            or f"right = {self.name}_right({given}, batch, cindex[:, None], cmask[:, None], dindex, dmask, XBLOCK, RBLOCK)",
            "sums = tp.dot(left, tl.trans(right), sums)",
        ]
        body += [f"    {line}" for line in inside]
        end = "batch, xindex, xmask, cindex[None, :], cmask[None, :], sums, ROWS, XBLOCK"
        body.append(f"{self.name}_end({given}, {end})")
        taken = ", ".join([*self.buffers, "XBLOCK: tl.constexpr", "RBLOCK: tl.constexpr"])
        return ["@triton.jit", f"def {self.name}({taken}):", *(f"    {line}" for line in body)]

    def _descriptor(self, k: int, outer: Var, block: str) -> list[str]:
        """The line that makes an operand's tensor descriptor."""
        described = self.described[k]
        if described is None:
            return []
        side = SIDES[k]
        v, digits = self.values([], (), ())
        start = v.expr(described.start)
        sizes = [str(count((outer,))), str(count((self.found.depth,)))]
        blocks = [block, "RBLOCK"]
        if not described.along:
            sizes, blocks = sizes[::-1], blocks[::-1]
        buffer = {b.name: name for b, name in self.views}.get(described.buffer, described.buffer)
        made = f"tl.make_tensor_descriptor({buffer} + ({start}), [{', '.join(sizes)}], [{described.line}, 1], [{', '.join(blocks)}])"
        return [*digits, f"{side}_blocks = {made}"]

    def _block(self, k: int, first: str) -> str:
        """The line that loads a block of an operand by its tensor descriptor; "" if it has none."""
        described = self.described[k]
        if described is None:
            return ""
        side = SIDES[k]
        load = (
            f"{side}_blocks.load([{first}, roffset])"
            if described.along
            else f"tl.trans({side}_blocks.load([roffset, {first}]))"
        )
        return f"{side} = {load}"

    def _there(self, index: str, v: Var, block: str, shape: str) -> str:
        """Which places of a block there are: all of them, where whole blocks make up the loop."""
        n = count((v,))
        return f"tl.full({shape}, True, tl.int1) if {n} % {block} == 0 else {index} < {n}"


__all__ = ["render_fused"]
