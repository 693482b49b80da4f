"""C++ loops over variables, parallel or in vectors, and the stores inside of them: what all loop shapes share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from ..ir.index import Expr, Var, product
from ..ir.nodes import index_node
from ..kernels.plan import Reduce, Store
from ..tile.loops import FlatStatement
from .cpp import COMPUTE, MEMORY, Writer


class LoopWriter(Writer):
    # -- loops ---------------------------------------------------------------------------------------------------------
    def _work(self) -> int | Expr:
        total: int | Expr = 0
        for p in self.fk.phases:
            total = total + product([*(v.extent for v in self.fk.outer), *(v.extent for v in p.inner)])
        return total

    def pragma(self, collapse: int) -> str:
        """An OpenMP pragma for a loop, or nothing if the work is small."""
        if self.fk.kernel.serial:
            return ""
        work = self._work()
        depth = f" collapse({collapse})" if collapse > 1 else ""
        if isinstance(work, int) or work.is_const:
            return f"#pragma omp parallel for{depth} schedule(static)" if int(work) >= self.threshold else ""
        return f"#pragma omp parallel for{depth} schedule(static) if ({self.address(work)} >= {self.threshold})"

    def loops(self, vars_: list[Var], pragma: str, then: Callable[[], None], sealed: bool = False, **kw: bool) -> None:
        """Nested loops over `vars_`; a pragma that collapses them seals all but the last."""
        if not vars_:
            then()
            return
        v, rest = vars_[0], vars_[1:]
        if pragma:
            self.line(pragma)
        sealed = sealed or "collapse" in pragma
        head = f"for (int64_t {v.name} = 0; {v.name} < {self.size(v.extent)}; ++{v.name})"
        with self.block(head, v, sealed=sealed and bool(rest), **kw):
            self.loops(rest, "", then, sealed, **kw)

    def size(self, n: int | Expr) -> str:
        return str(n) if isinstance(n, int) else self.address(n)

    def vector_loop(
        self,
        v: Var,
        lo: str,
        hi: int | Expr | str,
        body: Callable[[], None],
        pragma: str = "",
        whole_vectors: bool = False,
    ) -> None:
        """Whole vectors, then one partial vector if the extent asks for it (never, the caller knows, with `whole_vectors`)."""
        self.lane_var = v
        end = hi if isinstance(hi, str) else self.size(hi)
        exact = whole_vectors or (isinstance(hi, int) and lo == "0" and hi % self.lanes == 0)
        if whole_vectors:
            whole = end
        elif isinstance(hi, int) and lo == "0":
            whole = str(hi - hi % self.lanes)
        else:
            whole = self.fresh("whole")
            self.line(f"const int64_t {whole} = {lo} + ({end} - ({lo})) / VL * VL;")
        if whole != "0":
            if pragma:
                self.line(pragma)
            self.count = None
            with self.block(f"for (int64_t {v.name} = {lo}; {v.name} < {whole}; {v.name} += VL)", v):
                body()
        if not exact:
            with self.block(f"if ({whole} < {end})"):
                self.line(f"const int64_t {v.name} = {whole};")
                self.line(f"const int live = int({end} - {whole});")
                self.scopes[-1].bound.add(v)
                self.count = "live"
                body()
                self.count = None
        self.lane_var = None

    def enough(self, vars_: list[Var]) -> bool:
        n = product(v.extent for v in vars_)
        return not isinstance(n, int) or n >= 2 * self.threads

    def tile_arrays(self, per: int) -> None:
        for b in self.fk.kernel.scratch:
            n = product(b.shape)
            self.line(
                f"alignas(64) {MEMORY[b.dtype]} {b.name}[{self.size(n)} * {per}];"
                if per > 1
                else f"alignas(64) {MEMORY[b.dtype]} {b.name}[{self.size(n)}];"
            )

    # -- stores --------------------------------------------------------------------------------------------------------
    def stored_dtype(self, s: FlatStatement) -> str:
        assert not isinstance(s.source, Reduce)
        buffer = s.source.buffer
        tile = self.tile_shapes.get(buffer)
        return tile.dtype if tile is not None else self.layouts[buffer].dtype

    def where(self, s: FlatStatement) -> str:
        assert s.where is not None
        for n in index_node(s.where).children():
            self.value(n)
        return self.address(s.where)

    def store_scalar(self, s: FlatStatement) -> None:
        assert isinstance(s.source, Store)
        text, _ = self.value(s.value)
        at = f"{s.source.buffer}[{self.where(s)}]"
        ctype = COMPUTE[s.value.dtype]
        if s.source.mode != "set":
            text = self.tables.combine(s.source.mode, s.value.dtype, f"cast<{ctype}>({at})", text, False)
        guard = nullcontext()
        if s.mask is not None:
            mask, _ = self.value(s.mask)
            guard = self.block(f"if ({mask})")  # type: ignore[assignment]
        with guard:
            self.line(f"{at} = cast<{MEMORY[self.stored_dtype(s)]}>({text});")

    def _store_in_tile(self, s: FlatStatement, buffer: str, text: str) -> None:
        """A vector into a scratch tile, whose elements are as many lanes each as the tile is wide."""
        width = self.tile if self.tile_start is not None else self.lanes
        lane = f"({self.lane_text()} - {self.tile_start})" if self.tile_start is not None else "0"
        self.line(f"storeu({buffer} + ({self.where(s)}) * {width} + {lane}, {text});")

    def store_vector(self, s: FlatStatement) -> None:
        assert isinstance(s.source, Store)
        assert s.where is not None
        assert self.lane_var is not None
        text, is_vector = self.value(s.value)
        ctype = COMPUTE[s.value.dtype]
        if not is_vector:
            text = f"splat<{ctype}>({text})"
        buffer = s.source.buffer
        if buffer in self.tile_shapes and self.choice.mode == "outer":
            assert s.mask is None, "a scratch tile is defined whole (the plan's checker refuses anything else)"
            assert s.source.mode == "set", "a scratch tile is defined once"
            self._store_in_tile(s, buffer, text)
            return
        where = self.where(s)
        c = self.step(s.where)
        n = f", {self.count}" if self.count is not None else ""
        live = f"lane_mask({self.count})" if self.count is not None else "all_lanes()"
        if s.mask is not None:
            mtext, mvec = self.value(s.mask)
            live = f"({live} & {mtext if mvec else f'splat<bool>({mtext})'})"
        near = c is not None and c == 1
        if s.source.mode != "set":
            # The old value is read where the new one is stored, and nowhere else.
            if near:
                old = (
                    f"load_where({buffer} + {where}, {live})" if s.mask is not None else f"loadu({buffer} + {where}{n})"
                )
            else:
                old = f"gather({buffer}, {self.index_vector(s.where)}, {live})"
            text = self.tables.combine(s.source.mode, s.value.dtype, old, text, True)
        if near and s.mask is None:
            self.line(f"storeu({buffer} + {where}, {text}{n});")
        else:
            self.line(f"scatter({buffer}, {self.index_vector(s.where)}, {text}, {live});")
