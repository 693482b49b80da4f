"""C++ loops whose lanes run over the innermost variable, and the parts that all loop shapes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

from ..ir.index import Expr, Var, of, product
from ..ir.nodes import Node, index_node
from ..kernels.plan import Reduce, Scan, Store
from ..tile.loops import FlatPhase, FlatStatement, best_inner
from .cpp import BLOCK, COMPUTE, MEMORY, Writer


class RowWriter(Writer):
    """The shapes `rows` and `scalar`, and the parts that all shapes share: parallel loops, accumulators, stores."""

    # -- parallel loops ------------------------------------------------------------------------------------------------
    def _work(self) -> int | Expr:
        total: int | Expr = 0
        for p in self.fk.phases:
            total = total + product([*(v.extent for v in self.fk.outer), *(v.extent for v in p.inner)])
        return total

    def _pragma(self, collapse: int) -> str:
        """An OpenMP pragma for a loop, or nothing if the work is small."""
        if self.fk.kernel.serial:
            return ""
        work = self._work()
        depth = f" collapse({collapse})" if collapse > 1 else ""
        if isinstance(work, int) or work.is_const:
            return f"#pragma omp parallel for{depth} schedule(static)" if int(work) >= self.threshold else ""
        return f"#pragma omp parallel for{depth} schedule(static) if ({self.address(work)} >= {self.threshold})"

    def _loops(self, vars_: list[Var], pragma: str, then: Callable[[], None], sealed: bool = False, **kw: bool) -> None:
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
            self._loops(rest, "", then, sealed, **kw)

    def size(self, n: int | Expr) -> str:
        return str(n) if isinstance(n, int) else self.address(n)

    def _vector_loop(
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

    def _enough(self, vars_: list[Var]) -> bool:
        n = product(v.extent for v in vars_)
        return not isinstance(n, int) or n >= 2 * self.threads

    # -- shapes --------------------------------------------------------------------------------------------------------
    def _rows(self) -> None:
        outer = list(self.fk.outer)
        parallel_inside = not self._enough(outer) and not self.fk.kernel.serial
        pragma = "" if parallel_inside or not outer else self._pragma(len(outer))

        def point() -> None:
            self._tile_arrays(1)
            for k, phase in enumerate(self.fk.phases):
                self._row_phase(phase, k, parallel_inside)

        self._loops(outer, pragma, point)

    def _scalar(self) -> None:
        outer = list(self.fk.outer)
        pragma = self._pragma(len(outer)) if outer else ""

        def point() -> None:
            self._tile_arrays(1)
            for k, phase in enumerate(self.fk.phases):
                self._row_phase(phase, k, False)

        self._loops(outer, pragma, point)

    def _tile_arrays(self, per: int) -> None:
        for b in self.fk.kernel.scratch:
            n = product(b.shape)
            self.line(
                f"alignas(64) {MEMORY[b.dtype]} {b.name}[{self.size(n)} * {per}];"
                if per > 1
                else f"alignas(64) {MEMORY[b.dtype]} {b.name}[{self.size(n)}];"
            )

    def _row_phase(self, phase: FlatPhase, number: int, parallel: bool) -> None:
        """One phase in `rows` or `scalar` shape. Registers are declared outside, in the scope of the outer point."""
        reduces = [s for s in phase.body if isinstance(s.source, Reduce)]
        scans = [s for s in phase.body if isinstance(s.source, Scan)]
        for s in reduces:
            assert isinstance(s.source, Reduce)
            self.line(f"{COMPUTE[s.source.dtype]} {s.source.name};")
        if not phase.inner:
            with self.block("", after_writes=number > 0):
                self.lane_var = None
                for s in phase.body:
                    self._store_scalar(s)
            return
        v = best_inner(phase)
        rest = [u for u in phase.inner if u is not v]
        lanes = self.choice.mode == "inner" and not scans and self._lanes_fit(phase, v)
        atomic = any(isinstance(s.source, Store) and s.source.atomic for s in phase.body)
        spread = parallel and not scans and not atomic
        if spread and self._parallel_phase(phase, number, v, rest, lanes, reduces):
            return
        with self.block("", after_writes=number > 0):
            wide = self._wide(phase, lanes)
            accs = self._open_accumulators(reduces, lanes, wide)
            runs = self._open_scans(scans)

            def loop() -> None:
                self._innermost(phase, v, lanes, accs, runs, "0", v.extent, "")

            self._loops(rest, "", loop)
            self._close_accumulators(reduces, accs, lanes, wide=wide)

    def _lanes_fit(self, phase: FlatPhase, v: Var) -> bool:
        """Lanes must not write one element twice, and an extent below one vector is better done one by one."""
        if isinstance(v.extent, int) and v.extent < self.lanes // 2:
            return False
        for s in phase.body:
            if s.where is not None:
                c = s.where.coefficient(v)
                if c is None or (isinstance(s.source, Store) and s.source.atomic and c != 1):
                    return False
        return True

    def _parallel_phase(
        self, phase: FlatPhase, number: int, v: Var, rest: list[Var], lanes: bool, reduces: list[FlatStatement]
    ) -> bool:
        """Few outer points: split the first loop of the phase over the threads, each with its own accumulators, combined in thread order."""
        work = product(u.extent for u in phase.inner)
        if isinstance(work, int) and work < self.threshold:
            return False
        if any(isinstance(s.source, Reduce) and s.source.kind.startswith("arg") for s in reduces) and rest:
            return False
        first = rest[0] if rest else v
        parts = {}
        wide = self._wide(phase, lanes)
        for s in reduces:
            assert isinstance(s.source, Reduce)
            parts[s.source.name] = self.fresh("part")
            ctype = COMPUTE[self._total(s) if s.source.name in wide else s.source.dtype]
            self.line(f"{ctype} {parts[s.source.name]}[MAX_THREADS];")
            if s.source.kind.startswith("arg"):
                self.line(f"{COMPUTE[s.value.dtype]} {parts[s.source.name]}_v[MAX_THREADS];")
        teams = self.fresh("threads")
        self.line(f"const int {teams} = thread_count();")
        self.line(f"#pragma omp parallel num_threads({teams})")
        with self.block("", after_writes=number > 0):
            step = self.lanes if first is v and lanes else 1
            self.line("const int me = omp_get_thread_num();")
            self.line(f"const int64_t from = chunk_begin({self.size(first.extent)}, {teams}, me, {step});")
            self.line(f"const int64_t to = chunk_begin({self.size(first.extent)}, {teams}, me + 1, {step});")
            accs = self._open_accumulators(reduces, lanes, wide)
            if first is v:
                self._innermost(phase, v, lanes, accs, {}, "from", "to", "")
            else:
                with self.block(f"for (int64_t {first.name} = from; {first.name} < to; ++{first.name})", first):
                    self._loops(rest[1:], "", lambda: self._innermost(phase, v, lanes, accs, {}, "0", v.extent, ""))
            self._close_accumulators(reduces, accs, lanes, {n: f"{p}[me]" for n, p in parts.items()}, wide)
        for s in reduces:
            assert isinstance(s.source, Reduce)
            name, part = s.source.name, parts[s.source.name]
            if s.source.kind.startswith("arg"):
                self.line(
                    f"{name} = combine_arg<{'true' if s.source.kind == 'argmax' else 'false'}>({part}_v, {part}, {teams});"
                )
                continue
            total, dtype = name, s.source.dtype
            if name in wide:
                total, dtype = self.fresh("total"), self._total(s)
            self.line(f"{COMPUTE[dtype] + ' ' if name in wide else ''}{total} = {part}[0];")
            combine = self.tables.combine(s.source.kind, dtype, total, f"{part}[k]", False)
            self.line(f"for (int k = 1; k < {teams}; ++k) {total} = {combine};")
            if name in wide:
                self.line(f"{name} = {COMPUTE[s.source.dtype]}({total});")
        return True

    # -- accumulators --------------------------------------------------------------------------------------------------
    def _inexact(self, s: FlatStatement) -> bool:
        """A float sum or product: the order of its steps shows in the result."""
        return (
            isinstance(s.source, Reduce) and s.source.kind in self.tables.inexact and s.source.dtype.startswith("float")
        )

    def _total(self, s: FlatStatement) -> str:
        """The dtype of the running total of a long sum."""
        assert isinstance(s.source, Reduce)
        return self.tables.total(s.source.kind, s.source.dtype)

    def _wide(self, phase: FlatPhase, lanes: bool) -> frozenset[str]:
        """Registers whose long float sums are kept in double from one block of steps to the next: exact enough at no cost."""
        v = best_inner(phase)
        steps = product(u.extent for u in phase.inner if u is not v) * (
            -(-v.extent // self.lanes) if lanes else v.extent
        )
        if isinstance(steps, int) and steps <= BLOCK:
            return frozenset()
        return frozenset(s.source.name for s in phase.body if isinstance(s.source, Reduce) and self._inexact(s))

    def _compensated(self, s: FlatStatement, wide: frozenset[str]) -> bool:
        """A long sum for which there is no wider type: what its total loses by rounding is kept beside it."""
        source = s.source
        return isinstance(source, Reduce) and source.name in wide and self.tables.compensated(source.kind, source.dtype)

    def _open_accumulators(
        self, reduces: list[FlatStatement], lanes: bool, wide: frozenset[str] = frozenset()
    ) -> dict[str, str]:
        accs: dict[str, str] = {}
        for s in reduces:
            assert isinstance(s.source, Reduce)
            acc = accs[s.source.name] = self.fresh("acc")
            dtype = self._total(s) if s.source.name in wide else self._acc_dtype(s)
            start = self.tables.identity(s.source.kind, dtype)
            ctype = COMPUTE[dtype]
            low = f", {acc}_low = {acc}" if self._compensated(s, wide) else ""
            self.line(f"auto {acc} = splat<{ctype}>({start}){low};" if lanes else f"{ctype} {acc} = {start}{low};")
            if s.source.kind.startswith("arg"):
                self.line(f"auto {acc}_at = splat<int64_t>(0);" if lanes else f"int64_t {acc}_at = 0;")
                self.line(f"auto {acc}_any = no_lanes();" if lanes else f"bool {acc}_any = false;")
        return accs

    @staticmethod
    def _acc_dtype(s: FlatStatement) -> str:
        assert isinstance(s.source, Reduce)
        return s.value.dtype if s.source.kind.startswith("arg") else s.source.dtype

    def _close_accumulators(
        self,
        reduces: list[FlatStatement],
        accs: dict[str, str],
        lanes: bool,
        target: Mapping[str, str] | None = None,
        wide: frozenset[str] = frozenset(),
    ) -> None:
        for s in reduces:
            assert isinstance(s.source, Reduce)
            acc, name = accs[s.source.name], (target or {}).get(s.source.name, s.source.name)
            if s.source.kind.startswith("arg"):
                big = "true" if s.source.kind == "argmax" else "false"
                self.line(f"{name} = {f'horizontal_arg<{big}>({acc}, {acc}_at, {acc}_any)' if lanes else f'{acc}_at'};")
                if target is not None:
                    value = name.replace("[me]", "_v[me]")
                    self.line(f"{value} = {f'lane_value<{big}>({acc}, {acc}_any)' if lanes else acc};")
            else:
                total = f"with_low({acc}, {acc}_low)" if self._compensated(s, wide) else acc
                total = self.tables.horizontal(s.source.kind, total) if lanes else total
                wider = target is not None and s.source.name in wide
                ctype = COMPUTE[self._total(s) if wider else s.source.dtype]
                self.line(f"{name} = {ctype}({total});")

    def _accumulate(self, s: FlatStatement, acc: str, position: Node | None) -> None:
        assert isinstance(s.source, Reduce)
        text, is_vector = self.value(s.value)
        kind, dtype = s.source.kind, self._acc_dtype(s)
        lanes = self.lane_var is not None
        if lanes and not is_vector:
            text = f"splat<{COMPUTE[dtype]}>({text})"
        if kind.startswith("arg"):
            assert position is not None
            at, at_vector = self.value(position)
            if lanes and not at_vector:
                at = f"splat<int64_t>({at})"
            live = (f"lane_mask({self.count})" if self.count else "all_lanes()") if lanes else "true"
            self.line(
                f"accumulate_arg<{'true' if kind == 'argmax' else 'false'}>({acc}, {acc}_at, {acc}_any, {text}, {at}, {live});"
            )
            return
        if lanes and self.count is not None:
            text = (
                f"select(lane_mask({self.count}), {text}, splat<{COMPUTE[dtype]}>({self.tables.identity(kind, dtype)}))"
            )
        self.line(f"{acc} = {self.tables.combine(kind, dtype, acc, text, lanes)};")

    def _position(self, phase: FlatPhase) -> Node | None:
        if not any(isinstance(s.source, Reduce) and s.source.kind.startswith("arg") for s in phase.body):
            return None
        total: int | Expr = 0
        for u in phase.inner:
            total = total * u.extent + of(u)
        return index_node(total)

    def _open_scans(self, scans: list[FlatStatement]) -> dict[int, str]:
        runs: dict[int, str] = {}
        for s in scans:
            assert isinstance(s.source, Scan)
            run = runs[id(s)] = self.fresh("run")
            self.line(f"{self._run_type(s)} {run} = {self.tables.identity(s.source.kind, s.value.dtype)};")
        return runs

    def _run_type(self, s: FlatStatement) -> str:
        # A running float sum is kept in double, as eager does.
        assert isinstance(s.source, Scan)
        return COMPUTE[self.tables.total(s.source.kind, s.value.dtype, scan=True)]

    def _innermost(
        self,
        phase: FlatPhase,
        v: Var,
        lanes: bool,
        accs: dict[str, str],
        runs: dict[int, str],
        lo: str,
        hi: int | Expr | str,
        pragma: str,
    ) -> None:
        position = self._position(phase)
        wide = self._wide(phase, lanes)
        sums = [s for s in phase.body if isinstance(s.source, Reduce) and s.source.name in wide]

        def body(names: dict[str, str]) -> None:
            for s in phase.body:
                if isinstance(s.source, Reduce):
                    self._accumulate(s, names[s.source.name], position)
                elif isinstance(s.source, Scan):
                    text, _ = self.value(s.value)
                    run = runs[id(s)]
                    ctype = self._run_type(s)
                    self.line(
                        f"{run} = {self.tables.combine(s.source.kind, s.value.dtype, run, f'{ctype}({text})', False)};"
                    )
                    self.line(
                        f"{s.source.buffer}[{self._where(s)}] = cast<{MEMORY[self._stored_dtype(s)]}>({COMPUTE[s.value.dtype]}({run}));"
                    )
                elif lanes:
                    self._store_vector(s)
                else:
                    self._store_scalar(s)

        def loop(names: dict[str, str], lo: str, hi: int | Expr | str, whole_vectors: bool = False) -> None:
            if lanes:
                self._vector_loop(v, lo, hi, lambda: body(names), pragma, whole_vectors)
            else:
                self.lane_var = None
                end = hi if isinstance(hi, str) else self.size(hi)
                with self.block(f"for (int64_t {v.name} = {lo}; {v.name} < {end}; ++{v.name})", v):
                    body(names)

        def flush(partial: dict[str, str]) -> None:
            for s in sums:
                assert isinstance(s.source, Reduce)
                acc = accs[s.source.name]
                part = f"cast<{COMPUTE[self._total(s)]}>({partial[s.source.name]})"
                if self._compensated(s, wide):
                    self.line(f"add_exactly({acc}, {acc}_low, {part});")
                    continue
                self.line(f"{acc} = {self.tables.combine(s.source.kind, self._total(s), acc, part, lanes)};")

        chunk = BLOCK * (self.lanes if lanes else 1)
        if sums and isinstance(hi, int) and lo == "0" and hi <= chunk:
            with self.block(""):
                partial = self._open_accumulators(sums, lanes)
                loop({**accs, **partial}, lo, hi)
                flush(partial)
        elif sums:
            # Long float sums go through partial sums of BLOCK steps.
            end = hi if isinstance(hi, str) else self.size(hi)
            full = isinstance(hi, int) and lo == "0" and hi % max(self.lanes, 1) == 0
            with self.block(f"for (int64_t {v.name}_b = {lo}; {v.name}_b < {end}; {v.name}_b += {chunk})"):
                stop = f"{v.name}_b + {chunk}"
                alike = full and isinstance(hi, int) and hi % chunk == 0
                self.line(f"const int64_t {v.name}_e = {stop if alike else f'{stop} < {end} ? {stop} : {end}'};")
                partial = self._open_accumulators(sums, lanes)
                loop({**accs, **partial}, f"{v.name}_b", f"{v.name}_e", full)
                flush(partial)
        else:
            loop(accs, lo, hi)

    # -- stores --------------------------------------------------------------------------------------------------------
    def _stored_dtype(self, s: FlatStatement) -> str:
        assert not isinstance(s.source, Reduce)
        buffer = s.source.buffer
        tile = self.tile_shapes.get(buffer)
        return tile.dtype if tile is not None else self.layouts[buffer].dtype

    def _where(self, s: FlatStatement) -> str:
        assert s.where is not None
        for n in index_node(s.where).children():
            self.value(n)
        return self.address(s.where)

    def _store_scalar(self, s: FlatStatement) -> None:
        assert isinstance(s.source, Store)
        text, _ = self.value(s.value)
        at = f"{s.source.buffer}[{self._where(s)}]"
        ctype = COMPUTE[s.value.dtype]
        if s.source.mode != "set":
            text = self.tables.combine(s.source.mode, s.value.dtype, f"cast<{ctype}>({at})", text, False)
        guard = nullcontext()
        if s.mask is not None:
            mask, _ = self.value(s.mask)
            guard = self.block(f"if ({mask})")  # type: ignore[assignment]
        with guard:
            self.line(f"{at} = cast<{MEMORY[self._stored_dtype(s)]}>({text});")

    def _store_in_tile(self, s: FlatStatement, buffer: str, text: str) -> None:
        """A vector into a scratch tile, whose elements are as many lanes each as the tile is wide."""
        width = self.tile if self.tile_start is not None else self.lanes
        lane = f"({self.lane_text()} - {self.tile_start})" if self.tile_start is not None else "0"
        self.line(f"storeu({buffer} + ({self._where(s)}) * {width} + {lane}, {text});")

    def _store_vector(self, s: FlatStatement) -> None:
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
        where = self._where(s)
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
