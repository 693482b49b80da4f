"""Functions of a kernel that runs several steps as one. Each computes a block of an operand or of a result, by the emitter of other kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir.index import Var
from ..ir.nodes import Buffer, Node
from ..kernels.operands import count
from ..kernels.plan import Kernel
from .triton_values import TYPES, Scope, Values


class Functions:
    """Writes these functions. Each takes the kernel's buffers, the batch, and the index and the mask of a block's rows and columns.

    batch  the loops that a program is at one point of.
    views  operands as they lie in memory: a layout under a name of its own, and the buffer.
    """

    def __init__(
        self,
        kernel: Kernel,
        layouts: Mapping[str, Buffer],
        name: str,
        int64_index: bool,
        batch: tuple[Var, ...],
        views: tuple[tuple[Buffer, str], ...],
    ) -> None:
        self.kernel, self.name, self.int64_index, self.batch, self.views = kernel, name, int64_index, batch, views
        self.layouts = {**layouts, **{b.name: b for b, _ in views}}
        self.buffers = (*kernel.reads, *kernel.writes)
        self.long = ".to(tl.int64)" if int64_index else ""

    def values(self, lines: list[str], outer: tuple[Var, ...], inner: tuple[Var, ...]) -> tuple[Values, list[str]]:
        """The emitter of a function over blocks of `outer` by `inner`, and the lines that make its loop variables."""
        v = Values(self.layouts, Scope(lines), Scope(lines), True, self.int64_index)
        v.inner, v.inner_mask, v.uniform = frozenset(inner), "rmask0", frozenset(self.batch)
        v.across, v.along, v.loops = outer, inner, ()
        digits: list[str] = []
        for loops, index in ((self.batch, "batch"), (outer, "xindex"), (inner, "rindex0")):
            step = 1
            for k, loop in reversed(list(enumerate(loops))):
                text = index if step == 1 else f"{index} // {step}"
                digits.append(f"{loop.name} = {text if k == 0 else f'({text}) % {loop.extent}'}")
                v.loop_names[loop] = loop.name
                step *= count((loop,))
        return v, digits

    def function(self, side: str, v: Values, lines: Sequence[str], digits: Sequence[str], *more: str) -> list[str]:
        given = [*self.buffers, "batch", "xindex", "xmask", "rindex0", "rmask0", *more]
        used = "\n".join(lines)
        views = [f"{b.name} = {buffer}" for b, buffer in self.views if b.name in used]
        return [
            "@triton.jit",
            f"def {self.name}_{side}({', '.join(given)}, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):",
            *(f"    {line}" for line in (*digits, *views, *v.constants, *lines)),
        ]

    def operand(self, side: str, outer: tuple[Var, ...], inner: tuple[Var, ...], value: Node) -> list[str]:
        """A block of an operand; 0 outside of it."""
        lines: list[str] = []
        v, digits = self.values(lines, outer, inner)
        # What is only loaded goes to the matrix units as it lies in memory.
        made = v.load(value).removesuffix(".to(tl.float32)") if value.op == "load" else v.node(value)
        lines.append(f"return tl.broadcast_to({made}, [XBLOCK, RBLOCK]).to({TYPES[value.dtype]})")
        return self.function(side, v, lines, digits)


def rounded(value: str, dtype: str) -> str:
    """A block of float32 in a 16-bit dtype."""
    return f"tp.to_bfloat16({value})" if dtype == "bfloat16" else f"({value}).to({TYPES[dtype]})"


__all__ = ["Functions", "rounded"]
