"""The C++ function of one kernel. See `cpp.Writer` for values and addresses, `cpp_rows`, `cpp_outer`, `cpp_tiles` and `cpp_strips` for loops.

Six shapes of code:
  rows    lanes run over the innermost loop of each phase; registers are scalars            (softmax, layer norm)
  lanes   lanes run over an outer variable, whose loop is outside the phases; registers are vectors   (pointwise, pooling)
  tile    as `lanes`, but the outer variable is cut in tiles and runs inside the phases; registers are small arrays   (column sums)
  cross   as `lanes`, in square tiles, where buffers are read or written across the lanes   (transposes)
  strips  as `rows`, in groups of rows, where buffers are read across the rows   (softmax of a sum with a transpose)
  scalar  no lanes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ...generated.targets import CpuTarget
from ..ir.index import expr, product
from ..ir.nodes import Buffer
from ..ir.quote import comment_text
from ..kernels.plan import Kernel
from ..kernels.statements import kernel_checks
from ..tile.loops import FlatKernel, FlatPhase, coalesce, flatten
from ..tile.pieces import MAX_PIECES, split_kernel
from .cpp import BLOCK, FAULT, MEMORY
from .cpp_pieces import are_alike, as_functions, from_start
from .cpp_shared import FEW, Function
from .cpp_sizes import size_text
from .cpp_strips import StripWriter
from .cpp_tables import CppTables


def render_kernel(
    kernel: Kernel, layouts: Mapping[str, Buffer], tables: CppTables, target: CpuTarget, *, threads: int, threshold: int
) -> list[Function]:
    """The C++ functions of a kernel. The last has the kernel's name and takes the pointers of `reads`, then of `writes`, then size symbols (int64_t);
    those before it are the pieces that it calls.

    A kernel with checked positions returns an int: 0, or the number of the check that failed (`kernel_checks`).
    """
    flat = split_kernel(flatten(kernel, dict(layouts)))
    checked = bool(kernel_checks(kernel))
    params = parameters(kernel, layouts)

    def texts(pieces: Sequence[FlatKernel]) -> list[str]:
        merged = [coalesce(piece) for piece in pieces] if len(pieces) > 1 else pieces
        return ["\n".join(KernelWriter(fk, layouts, tables, target, threads, threshold).body()) for fk in merged]

    functions: list[Function] = []
    bodies: list[str] = []
    if len(flat) >= FEW and not checked:
        bodies = texts([from_start(fk) for fk in flat])
    if bodies and (len(flat) > MAX_PIECES or are_alike(bodies, params)):
        starts = [size_text(expr(b.start) - a.start) for a, b in pairwise([flat[0], *flat])]
        functions, text = as_functions(kernel.name, params, bodies, starts)
    else:
        bodies = texts(flat)
        text = bodies[0] if len(bodies) == 1 else "\n".join(f"    {{\n{b}\n    }}" for b in bodies)
    if checked:
        text = f"    int {FAULT} = 0;\n{text}\n    return {FAULT};"
    head = "".join(f"// {comment_text(o)}\n" for o in kernel.origins)
    return [*functions, _exported(kernel, layouts, text, head)]


def parameters(kernel: Kernel, layouts: Mapping[str, Buffer]) -> dict[str, str]:
    """The arguments of a kernel's function: C++ types by name."""
    params = {b: f"const {MEMORY[layouts[b].dtype]}*" for b in kernel.reads}
    params |= {b: f"{MEMORY[layouts[b].dtype]}*" for b in kernel.writes}
    return params | dict.fromkeys(kernel.symbols, "int64_t")


def _exported(kernel: Kernel, layouts: Mapping[str, Buffer], body: str, head: str = "") -> Function:
    result = "int" if kernel_checks(kernel) else "void"
    return Function(kernel.name, parameters(kernel, layouts), body, result, exported=True, head=head)


def render_moved(kernel: Kernel, layouts: Mapping[str, Buffer], function: str, steps: Sequence[int]) -> Function:
    """A kernel that does what another `function` does with buffers that begin so many elements later."""
    moved = [f"{b} + ({n})" if n else b for b, n in zip((*kernel.reads, *kernel.writes), steps, strict=True)]
    return _exported(kernel, layouts, f"    return {function}({', '.join([*moved, *kernel.symbols])});")


class KernelWriter(StripWriter):
    """Chooses the shape."""

    def body(self) -> list[str]:
        """The lines between the braces."""
        mode = self._mode()
        if (transpose_tiles := self.find_transpose_tiles() if mode == "lanes" else None) is not None:
            self._transpose_tiled(transpose_tiles)
        elif (strips := self.find_strips()) is not None:
            self._grouped_rows(strips)
        elif mode == "rows":
            self._rows()
        elif mode == "lanes":
            self._lanes()
        elif mode == "tile":
            self._tiles()
        else:
            self._scalar()
        return self.scopes[0].lines

    def _mode(self) -> str:
        if self.choice.mode != "outer":
            return "rows" if self.choice.mode == "inner" else "scalar"
        assert self.choice.var is not None
        if not all(self._is_short(p) for p in self.fk.phases if p.inner):
            return "tile"
        # Two blocks: registers that go through whole rows of several vectors are faster, arrays in memory slower.
        long = any(map(self.has_long_sum, self.fk.phases))
        return "tile" if long and self._register_width(self.choice.var) > 1 else "lanes"

    def _is_short(self, phase: FlatPhase) -> bool:
        """Whether the loop can stay inside the lanes; sums of many blocks need a wider total."""
        limit = 2 * BLOCK if any(self.inexact(s) for s in phase.body) else self.target.budgets.inner
        depth = product(v.extent for v in phase.inner)
        return isinstance(depth, int) and depth <= limit
