"""C++ loops whose lanes run over the innermost variable, or that have no lanes."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.index import Expr, Var, product
from ..kernels.plan import Reduce, Scan, Store
from ..tile.loops import FlatPhase, FlatStatement, best_inner
from .cpp import BLOCK, COMPUTE, MEMORY
from .cpp_accumulators import AccumulatorWriter


@dataclass
class InnerLoop:
    """The innermost loop of a phase: over `v`, in vectors if it has `lanes`.

    accs  the accumulator of each reduction; runs  the running value of each scan, by the identity of its statement.
    """

    writer: AccumulatorWriter
    phase: FlatPhase
    v: Var
    lanes: bool
    accs: dict[str, str]
    runs: dict[int, str]

    def write(self, lo: str, hi: int | Expr | str) -> None:
        """The loop from `lo` up to `hi`. Long float sums go through partial sums of BLOCK steps."""
        self.wide = self.writer.wide(self.phase, self.lanes)
        self.sums = [s for s in self.phase.body if isinstance(s.source, Reduce) and s.source.name in self.wide]
        chunk = BLOCK * (self.writer.lanes if self.lanes else 1)
        if not self.sums:
            self._loop(self.accs, lo, hi)
        elif isinstance(hi, int) and lo == "0" and hi <= chunk:
            with self.writer.block(""):
                self._partial(lo, hi)
        else:
            self._blocks(lo, hi, chunk)

    def _blocks(self, lo: str, hi: int | Expr | str, chunk: int) -> None:
        v, writer = self.v, self.writer
        end = hi if isinstance(hi, str) else writer.size(hi)
        full = isinstance(hi, int) and lo == "0" and hi % max(writer.lanes, 1) == 0
        with writer.block(f"for (int64_t {v.name}_b = {lo}; {v.name}_b < {end}; {v.name}_b += {chunk})"):
            stop = f"{v.name}_b + {chunk}"
            alike = full and isinstance(hi, int) and hi % chunk == 0
            writer.line(f"const int64_t {v.name}_e = {stop if alike else f'{stop} < {end} ? {stop} : {end}'};")
            self._partial(f"{v.name}_b", f"{v.name}_e", full)

    def _partial(self, lo: str, hi: int | Expr | str, whole_vectors: bool = False) -> None:
        """Sums of these steps alone, which are then added to the totals."""
        writer = self.writer
        partial = writer.open_accumulators(self.sums, self.lanes)
        self._loop({**self.accs, **partial}, lo, hi, whole_vectors)
        for s in self.sums:
            assert isinstance(s.source, Reduce)
            acc = self.accs[s.source.name]
            part = f"cast<{COMPUTE[writer.total_dtype(s)]}>({partial[s.source.name]})"
            if writer.compensated(s, self.wide):
                writer.line(f"add_exactly({acc}, {acc}_low, {part});")
                continue
            total = writer.tables.combine(s.source.kind, writer.total_dtype(s), acc, part, self.lanes)
            writer.line(f"{acc} = {total};")

    def _loop(self, names: dict[str, str], lo: str, hi: int | Expr | str, whole_vectors: bool = False) -> None:
        v, writer = self.v, self.writer
        if self.lanes:
            writer.vector_loop(v, lo, hi, lambda: self._body(names), "", whole_vectors)
            return
        writer.lane_var = None
        end = hi if isinstance(hi, str) else writer.size(hi)
        with writer.block(f"for (int64_t {v.name} = {lo}; {v.name} < {end}; ++{v.name})", v):
            self._body(names)

    def _body(self, names: dict[str, str]) -> None:
        position = self.writer.position(self.phase)
        for s in self.phase.body:
            if isinstance(s.source, Reduce):
                self.writer.accumulate(s, names[s.source.name], position)
            elif isinstance(s.source, Scan):
                self._scan(s, s.source)
            elif self.lanes:
                self.writer.store_vector(s)
            else:
                self.writer.store_scalar(s)

    def _scan(self, s: FlatStatement, scan: Scan) -> None:
        writer, run, dtype = self.writer, self.runs[id(s)], s.value.dtype
        text, _ = writer.value(s.value)
        writer.line(f"{run} = {writer.tables.combine(scan.kind, dtype, run, f'{writer.run_type(s)}({text})', False)};")
        stored = f"cast<{MEMORY[writer.stored_dtype(s)]}>({COMPUTE[dtype]}({run}))"
        writer.line(f"{scan.buffer}[{writer.where(s)}] = {stored};")


class RowWriter(AccumulatorWriter):
    """The shapes `rows` and `scalar`."""

    # -- shapes --------------------------------------------------------------------------------------------------------
    def _rows(self) -> None:
        outer = list(self.fk.outer)
        parallel_inside = not self.enough(outer) and not self.fk.kernel.serial
        pragma = "" if parallel_inside or not outer else self.pragma(len(outer))

        def point() -> None:
            self.tile_arrays(1)
            for k, phase in enumerate(self.fk.phases):
                self._row_phase(phase, k, parallel_inside)

        self.loops(outer, pragma, point)

    def _scalar(self) -> None:
        outer = list(self.fk.outer)
        pragma = self.pragma(len(outer)) if outer else ""

        def point() -> None:
            self.tile_arrays(1)
            for k, phase in enumerate(self.fk.phases):
                self._row_phase(phase, k, False)

        self.loops(outer, pragma, point)

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
                    self.store_scalar(s)
            return
        v = best_inner(phase)
        rest = [u for u in phase.inner if u is not v]
        lanes = self.choice.mode == "inner" and not scans and self._lanes_fit(phase, v)
        atomic = any(isinstance(s.source, Store) and s.source.atomic for s in phase.body)
        spread = parallel and not scans and not atomic
        if spread and self._parallel_phase(phase, number, v, rest, lanes, reduces):
            return
        with self.block("", after_writes=number > 0):
            wide = self.wide(phase, lanes)
            accs = self.open_accumulators(reduces, lanes, wide)
            runs = self.open_scans(scans)

            def loop() -> None:
                InnerLoop(self, phase, v, lanes, accs, runs).write("0", v.extent)

            self.loops(rest, "", loop)
            self.close_accumulators(reduces, accs, lanes, wide=wide)

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
        wide = self.wide(phase, lanes)
        for s in reduces:
            assert isinstance(s.source, Reduce)
            parts[s.source.name] = self.fresh("part")
            ctype = COMPUTE[self.total_dtype(s) if s.source.name in wide else s.source.dtype]
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
            accs = self.open_accumulators(reduces, lanes, wide)
            inner = InnerLoop(self, phase, v, lanes, accs, {})
            if first is v:
                inner.write("from", "to")
            else:
                with self.block(f"for (int64_t {first.name} = from; {first.name} < to; ++{first.name})", first):
                    self.loops(rest[1:], "", lambda: inner.write("0", v.extent))
            self.close_accumulators(reduces, accs, lanes, {n: f"{p}[me]" for n, p in parts.items()}, wide)
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
                total, dtype = self.fresh("total"), self.total_dtype(s)
            self.line(f"{COMPUTE[dtype] + ' ' if name in wide else ''}{total} = {part}[0];")
            combine = self.tables.combine(s.source.kind, dtype, total, f"{part}[k]", False)
            self.line(f"for (int k = 1; k < {teams}; ++k) {total} = {combine};")
            if name in wide:
                self.line(f"{name} = {COMPUTE[s.source.dtype]}({total});")
        return True
