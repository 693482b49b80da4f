"""Two products around a softmax as one Triton kernel: what `fuse/attention.py` finds in the parts of a kernel.

A program computes a block of rows. It goes through blocks of columns with the matrix units: scores, what the program makes of them, and
the sum of values weighted by exp(logit - greatest logit so far), which shrinks when a greater one is met; it is divided by the sum of weights at
the end. So probabilities are rounded before the division, by the same relative error. Each operand, the logits and the end are functions
of their own, written by the emitter of other kernels. Where every logit has one factor, it goes into the exponent. What coordinates leave out
is looked at in those blocks of columns only where they leave out something (a branch: the matrix units wait for each other where the blocks are
two loops). Where data leave out columns (padding, documents), a loop over these data comes first, and says from which column to which there are any.

Infinities and NaNs come out as they do of the steps one by one: a row of -inf alone has a sum of 0, and 0 / 0 is nan; inf - inf is nan; and
values that nobody weighs are multiplied by 0 all the same, also those of columns that no row of a block has a logit for.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..fuse.attention import Attention
from ..ir.index import Var
from ..ir.nodes import Buffer, Node
from ..ir.quote import comment_text
from ..kernels.operands import HALF, count
from ..kernels.plan import Kernel
from ..machine import Gpu
from ..tile.attention import attention_of, least_block, rows_in_blocks
from ..tile.contraction import contraction
from ..tile.logits import factored, score_dtype, unrounded
from ..tile.mask_bounds import DataMaskBounds, Free, MaskBounds, data_mask_bounds, free_columns, mask_bounds
from .triton_functions import Functions, rounded
from .triton_fused import render_fused
from .triton_product import render_product
from .triton_values import TYPES


def render_matrices(kernel: Kernel, layouts: Mapping[str, Buffer], name: str, int64_index: bool) -> list[str]:
    """The functions of a kernel that uses the matrix units; without imports."""
    if kernel.tile is not None:
        return render_fused(kernel, layouts, name, int64_index)
    if kernel.parts:
        return _Renderer(attention_of(kernel, layouts), kernel, layouts, name, int64_index).render()
    product = contraction(kernel, layouts)
    assert product is not None
    return render_product(product, kernel, layouts, name, int64_index)


class _Renderer(Functions):
    def __init__(
        self, found: Attention, kernel: Kernel, layouts: Mapping[str, Buffer], name: str, int64_index: bool
    ) -> None:
        super().__init__(kernel, layouts, name, int64_index, found.batch, found.views)
        self.found, self.gpu = found, kernel.gpu
        logits, self.factor = factored(unrounded(found.logits, found.score[0]))
        self.seen, self.free = MaskBounds(), Free(logits)
        if len(found.rows) == len(found.columns) == 1:
            at = found.rows[0], found.columns[0]
            self.seen, self.free = mask_bounds(logits, *at), free_columns(logits, *at)
        self.data_bounds = data_mask_bounds(logits, found.rows, found.columns, found.score[0])

    def render(self) -> list[str]:
        f = self.found
        lines: list[str] = []
        sides = (
            ("left", f.rows, f.depth, f.left),
            ("right", f.columns, f.depth, f.right),
            ("values", f.columns, f.width, f.values),
        )
        for side, outer, inner, value in sides:
            lines += [*self.operand(side, outer, (inner,), value), "", ""]
        lines += [*self._logits(), "", "", *self._masked(), "", ""]
        for k, bound in enumerate(self.data_bounds):
            lines += self._data_bound(k, bound)
        return [*lines, *self._end(), "", "", *self._kernel()]

    # -- functions of a block ------------------------------------------------------------------------------------------
    def _logits(self) -> list[str]:
        """Logits of a block of scores, divided by their factor, also where coordinates leave them out."""
        f, logits = self.found, self.free.logits
        lines: list[str] = []
        v, digits = self.values(lines, f.rows, f.columns)
        name = f.score[0]
        v.local[name] = name
        v.inner_tiles.add(name)
        if (dtype := score_dtype(logits, name)) in HALF:
            lines.append(f"{name} = tp.to_dtype({name}, {TYPES[dtype]})")
        lines.append(f"return tl.broadcast_to({v.node(logits)}, [XBLOCK, RBLOCK])")
        return self.function("logits", v, lines, digits, name)

    def _masked(self) -> list[str]:
        """Logits of a block with -inf where coordinates leave them out, and beyond the columns."""
        f = self.found
        lines: list[str] = []
        v, digits = self.values(lines, f.rows, f.columns)
        asked = [v.node(n) if holds else f"({v.node(n)} == 0)" for n, holds in self.free.conditions]
        lines.append(f'return tl.where({" & ".join(["rmask0", *asked])}, logits, float("-inf"))')
        return self.function("masked", v, lines, digits, "logits")

    def _data_bound(self, k: int, bound: DataMaskBounds) -> list[str]:
        """What data brings for a row, and for a column."""
        f = self.found
        sides: list[tuple[str, tuple[Var, ...], tuple[Var, ...], Node, str]]
        sides = [(f"column{k}", (), f.columns, bound.column, "[1, RBLOCK]")]
        if bound.row is not None:
            sides.append((f"row{k}", f.rows, (), bound.row, "[XBLOCK, 1]"))
        made: list[str] = []
        for side, outer, inner, value, shape in sides:
            lines: list[str] = []
            v, digits = self.values(lines, outer, inner)
            number = "" if value.dtype == "bool" else ".to(tl.int64)"
            lines.append(f"return tl.broadcast_to({v.node(value)}, {shape}){number}")
            made += [*self.function(side, v, lines, digits), "", ""]
        return made

    def _end(self) -> list[str]:
        """The weighted sums, divided and stored."""
        f = self.found
        lines: list[str] = []
        v, digits = self.values(lines, f.rows, (f.width,))
        value = "sums * tp.reciprocal(total)"  # for each row; it is rounded to 16 bits next
        if f.empty is not None:
            v.local[f.top] = "top"
            value = f"tl.where({v.node(f.empty)}, sums * 0.0, {value})"
        where = f"{f.result.name} + tl.broadcast_to(xindex * 0 + {v.expr(f.place)}, [XBLOCK, RBLOCK])"
        lines.append(f"tl.store({where}, {rounded(value, f.result.dtype)}, xmask & rmask0)")
        return self.function("end", v, lines, digits, "sums", "top", "total")

    # -- the kernel ----------------------------------------------------------------------------------------------------
    def _kernel(self) -> list[str]:
        f = self.found
        rows, given = count(f.rows), ", ".join(self.buffers)
        depth, width = (least_block(v, self.gpu) for v in (f.depth, f.width))
        body = [
            f"# {comment_text(', '.join(self.kernel.origins))}",
            f"blocks: tl.constexpr = {rows_in_blocks(f, self.gpu)} // XBLOCK",
            f"batch = (tl.program_id(0) // blocks){self.long}",
            # Those with most to do begin first.
            f"block = {'tl.program_id(0)' if self.seen.behind is None else 'blocks - 1 - tl.program_id(0)'} % blocks",
            "first = block * XBLOCK",
            f"xindex = (first + tl.arange(0, XBLOCK)[:, None]){self.long}",
            f"xmask = {'tl.full([XBLOCK, 1], True, tl.int1)' if rows_in_blocks(f, self.gpu) == rows else f'xindex < {rows}'}",
            *self._inside("d", f.depth),
            *self._inside("w", f.width),
            f"left = {self.name}_left({given}, batch, xindex, xmask, dindex, dmask, XBLOCK, {depth})",
            'top = tl.full([XBLOCK, 1], float("-inf"), tl.float32)',
            "total = tl.full([XBLOCK, 1], 0.0, tl.float32)",
            f"sums = tl.zeros([XBLOCK, {width}], tl.float32)",
            *self._bounds(),
            _loop("start", "stop", self.gpu),
        ]
        inside = [
            *self._columns(),
            f"right = {self.name}_right({given}, batch, cindex[:, None], cmask[:, None], dindex, dmask, RBLOCK, {depth})",
            "score = tp.dot(left, tl.trans(right), tl.zeros([XBLOCK, RBLOCK], tl.float32))",
            *self._block_of_logits(),
            f"sums, total, top, weights = tp.online_weights(sums, total, top, logits, {self.factor!r}, {_halvings(f)})",
            self._block_of_values(),
            f"sums = tp.dot({rounded('weights', f.values.dtype)}, values, sums)",
        ]
        body += [f"    {line}" for line in inside]
        body += self._rest()
        scale = "" if self.factor == 1 else f" * {self.factor!r}"
        body.append(
            f"{self.name}_end({given}, batch, xindex, xmask, windex, wmask, sums, top{scale}, total, XBLOCK, {width})"
        )
        taken = ", ".join([*self.buffers, "XBLOCK: tl.constexpr", "RBLOCK: tl.constexpr"])
        return ["@triton.jit", f"def {self.name}({taken}):", *(f"    {line}" for line in body)]

    def _columns(self) -> list[str]:
        columns = count(self.found.columns)
        return [
            f"cindex = (roffset + tl.arange(0, RBLOCK)){self.long}",
            f"cmask = tl.full([RBLOCK], True, tl.int1) if {columns} % RBLOCK == 0 else cindex < {columns}",
        ]

    def _block_of_logits(self) -> list[str]:
        """Logits of a block; coordinates are asked only where they leave out something of it."""
        given, columns, live = ", ".join(self.buffers), count(self.found.columns), self.free.live
        index = f"{given}, batch, xindex, xmask, cindex[None, :], cmask[None, :]"
        lines = [f"logits = {self.name}_logits({index}, score, XBLOCK, RBLOCK)"]
        cut = [f"(roffset + RBLOCK > {columns})"]
        if live.before is not None:
            cut.append(f"(roffset < first + XBLOCK - {1 + live.before})")
        if live.behind is not None:
            cut.append(f"(roffset + RBLOCK > first + {1 + live.behind})")
        masked = [f"if {' | '.join(cut)}:", f"    logits = {self.name}_masked({index}, logits, XBLOCK, RBLOCK)"]
        if len(cut) == 1:
            masked = [f"if {columns} % RBLOCK != 0:", *(f"    {line}" for line in masked)]
        return [*lines, *masked]

    def _block_of_values(self) -> str:
        given, width = ", ".join(self.buffers), least_block(self.found.width, self.gpu)
        return f"values = {self.name}_values({given}, batch, cindex[:, None], cmask[:, None], windex, wmask, RBLOCK, {width})"

    def _bounds(self) -> list[str]:
        """From where to where columns have logits for a row of the block; nowhere, where the block has no rows."""
        rows, columns, seen = count(self.found.rows), count(self.found.columns), self.seen
        lines = [f"all = tl.where(first < {rows}, {columns}, 0)", "start = 0", "stop = all"]
        if seen.before is not None:
            lines[1] = f"start = tl.maximum(first - {seen.before}, 0) // RBLOCK * RBLOCK"
        if seen.behind is not None:
            lines[2] = f"stop = tl.maximum(tl.minimum(all, first + XBLOCK + {seen.behind}), 0)"
        return [*lines, *self._data_bounds()]

    def _data_bounds(self) -> list[str]:
        """From where to where data say that there are columns with logits for some row of the block."""
        if not self.data_bounds:
            return []
        given, columns = ", ".join(self.buffers), count(self.found.columns)
        step = min(self.gpu.tuning.attention.looked_at, max(self.gpu.limits.mma.edge, 1 << (columns - 1).bit_length()))
        lines: list[str] = []
        live = ["there"]
        for k, bound in enumerate(self.data_bounds):
            column = f"{self.name}_column{k}({given}, batch, xindex, xmask, index, there, XBLOCK, {step})"
            if bound.row is None:
                live.append(column)
                continue
            row = f"{self.name}_row{k}({given}, batch, xindex, xmask, dindex, dmask, XBLOCK, 1)"
            lines += [
                f"row{k} = {row}",
                f"least{k} = tl.min(tl.where(xmask, row{k}, {2**63 - 1}))",
                f"most{k} = tl.max(tl.where(xmask, row{k}, {-(2**63) + 1}))",
            ]
            limits = {
                "ge": ("<= most",),
                "gt": ("< most",),
                "le": (">= least",),
                "lt": ("> least",),
                "eq": (">= least", "<= most"),
            }
            live += [f"({column} {limit}{k})" for limit in limits[bound.op]]
        inside = [
            f"index = (coffset + tl.arange(0, {step})[None, :]){self.long}",
            f"there = index < {columns}",
            f"live = {' & '.join(live)}",
            f"begin = tl.minimum(begin, tl.min(tl.where(live, index, {columns})).to(tl.int32))",
            "end = tl.maximum(end, tl.max(tl.where(live, index + 1, 0)).to(tl.int32))",
        ]
        return [
            *lines,
            "begin = all",
            "end = all * 0",
            f"for coffset in tl.range(tp.bound(start), tp.bound(stop), {step}):",
            *(f"    {line}" for line in inside),
            "start = tl.maximum(start, begin // RBLOCK * RBLOCK)",
            "stop = tl.minimum(stop, end)",
        ]

    def _rest(self) -> list[str]:
        """Values that no row of the block weighs are multiplied by 0: what is not finite must come out."""
        seen = self.seen
        parts = [("0", "tl.minimum(start, all)")] if seen.before is not None or self.data_bounds else []
        if seen.behind is not None or self.data_bounds:
            parts.append(("tl.maximum((stop + RBLOCK - 1) // RBLOCK * RBLOCK, start)", "all"))
        if not parts:
            return []
        lines = [
            f"rest = tp.unweighed_zeros(RBLOCK, {least_block(self.found.width, self.gpu)}, {TYPES[self.found.values.dtype]})"
        ]
        for start, stop in parts:
            inside = [*self._columns(), self._block_of_values(), "rest = tp.unweighed(rest, values)"]
            lines += [_loop(start, stop, self.gpu), *(f"    {line}" for line in inside)]
        return [*lines, "sums += tl.sum(rest.to(tl.float32), 0)[None, :]"]

    def _inside(self, name: str, v: Var) -> list[str]:
        """The index of a loop that a block holds, and where it is."""
        n = least_block(v, self.gpu)
        some = f"tl.full([1, {n}], True, tl.int1)" if v.extent == n else f"{name}index < {v.extent}"
        return [f"{name}index = tl.arange(0, {n})[None, :]{self.long}", f"{name}mask = {some}"]


def _loop(start: str, stop: str, gpu: Gpu) -> str:
    """The head of a loop over blocks of columns."""
    num_stages = gpu.tuning.attention.num_stages
    return f"for roffset in tl.range(tp.bound({start}), tp.bound({stop}), RBLOCK, num_stages={num_stages}):"


def _halvings(f: Attention) -> int:
    """Of the greatest weight, 1. Sums are divided at the end: those of bfloat16, which has the range of float32, must not overflow before."""
    return (count(f.columns) - 1).bit_length() if f.values.dtype == "bfloat16" else 0


__all__ = ["render_matrices"]
