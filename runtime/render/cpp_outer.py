"""C++ loops whose lanes run over an outer variable: pointwise kernels, short windows, and reductions of columns."""

from __future__ import annotations

import functools
import math

from ..ir.index import Var, product
from ..kernels.plan import Reduce, Scan
from ..tile.loops import FlatPhase
from .cpp import BLOCK
from .cpp_columns import ArrayPhase, RegisterPhase
from .cpp_rows import RowWriter


class OuterWriter(RowWriter):
    """The shapes `lanes` and `tile`."""

    # -- lanes over an outer variable ----------------------------------------------------------------------------------
    def _lanes(self) -> None:
        w = self.choice.var
        assert w is not None
        near = self._near(w)
        others = [v for v in self.fk.outer if v is not w and v not in near]
        many = bool(others) and self.enough(others)

        def point() -> None:
            self.tile_arrays(self.lanes)
            for k, phase in enumerate(self.fk.phases):
                write = functools.partial(self._lane_phase, phase, k)
                self.loops(near, f"#pragma GCC unroll {self.target.budgets.near}" if near else "", write)

        def inside() -> None:
            self.vector_loop(w, "0", w.extent, point, "" if many else self.pragma(1))

        self.loops(others, self.pragma(len(others)) if many else "", inside)

    def _near(self, w: Var) -> list[Var]:
        """Loops of a few points that lie beside each other in what is stored (real and imaginary part, three colours): they run inside of the
        lanes' loop, so that memory is gone through once, and what the points share is computed once.
        """
        stores = [s for p in self.fk.phases for s in p.body]
        if len(self.fk.phases) > 1 or self.fk.phases[0].inner or any(s.where is None for s in stores):
            return []

        def inside(v: Var) -> bool:
            steps = [(s.where.coefficient(v), s.where.coefficient(w)) for s in stores if s.where is not None]
            return all(
                a is not None and b is not None and a.is_const and b.is_const and 0 < int(a) < int(b) for a, b in steps
            )

        most = self.target.budgets.near
        short = [v for v in self.fk.outer if v is not w and isinstance(v.extent, int) and v.extent <= most]
        found = [v for v in short if inside(v)]
        return found if math.prod(int(v.extent) for v in found) <= most else []

    def _lane_phase(self, phase: FlatPhase, number: int) -> None:
        reduces = [s for s in phase.body if isinstance(s.source, Reduce)]
        scans = [s for s in phase.body if isinstance(s.source, Scan)]
        position = self.position(phase)
        accs: dict[str, str] = {}
        # Registers of this shape are vectors, named like the register itself: declared in the scope of the outer point.
        for s in reduces:
            accs |= self.open_accumulators([s], True)
        runs: dict[int, str] = {}
        for s in scans:
            assert isinstance(s.source, Scan)
            runs[id(s)] = self.fresh("run")
            self.line(
                f"auto {runs[id(s)]} = splat<{self.run_type(s)}>({self.tables.identity(s.source.kind, s.value.dtype)});"
            )

        def body(names: dict[str, str]) -> None:
            for s in phase.body:
                if isinstance(s.source, Reduce):
                    self.accumulate(s, names[s.source.name], position)
                elif isinstance(s.source, Scan):
                    self.scan_vector(s, runs[id(s)])
                else:
                    self.store_vector(s)

        def blocks() -> None:
            last = phase.inner[-1]
            sums = [s for s in reduces if self.inexact(s)]
            b, n = f"{last.name}_b", self.size(last.extent)
            with self.block(f"for (int64_t {b} = 0; {b} < {n}; {b} += {BLOCK})"):
                partial = self.open_accumulators(sums, True)
                self.line(f"const int64_t {last.name}_e = {b} + {BLOCK} < {n} ? {b} + {BLOCK} : {n};")
                with self.block(f"for (int64_t {last.name} = {b}; {last.name} < {last.name}_e; ++{last.name})", last):
                    body({**accs, **partial})
                for s in sums:
                    assert isinstance(s.source, Reduce)
                    acc = accs[s.source.name]
                    self.line(
                        f"{acc} = {self.tables.combine(s.source.kind, s.source.dtype, acc, partial[s.source.name], True)};"
                    )

        with self.block("", after_writes=number > 0):
            if self.has_long_sum(phase):
                self.loops(list(phase.inner[:-1]), "", blocks, after_writes=number > 0)
            else:
                self.loops(list(phase.inner), "", lambda: body(accs), after_writes=number > 0)
        for s in reduces:
            assert isinstance(s.source, Reduce)
            acc = accs[s.source.name]
            self.line(f"const auto {s.source.name} = {f'{acc}_at' if s.source.kind.startswith('arg') else acc};")

    # -- tiles of an outer variable ------------------------------------------------------------------------------------
    def _tiles(self) -> None:
        w = self.choice.var
        assert w is not None
        others = [v for v in self.fk.outer if v is not w]
        biggest = max([1, *(int(n) for b in self.fk.kernel.scratch if isinstance(n := product(b.shape), int))])
        while self.tile > self.lanes and self.tile * biggest > self.target.budgets.tile:
            self.tile //= 2
        many = bool(others) and self.enough(others)
        width = self._register_width(w)
        if width > 1:
            self._register_tiles(w, others, many, width)
            return
        if not many and isinstance(w.extent, int):
            while self.tile > 4 * self.lanes and w.extent < 2 * self.threads * self.tile:
                self.tile //= 2
        # Arrays that are cleared and added up again and again are not much longer than what is kept in them.
        while self.tile > self.lanes and isinstance(w.extent, int) and self.tile >= 2 * w.extent:
            self.tile //= 2

        def tile() -> None:
            start, end = self.fresh("tile"), self.fresh("tile_end")
            if not many and (pragma := self.pragma(1)):
                self.line(pragma)
            with self.block(f"for (int64_t {start} = 0; {start} < {self.size(w.extent)}; {start} += {self.tile})"):
                self.line(
                    f"const int64_t {end} = {start} + {self.tile} < {self.size(w.extent)} ? {start} + {self.tile} : {self.size(w.extent)};"
                )
                self.tile_start = start
                self.tile_arrays(self.tile)
                for k, phase in enumerate(self.fk.phases):
                    ArrayPhase(self, phase, w, start, end).write(k)
                self.tile_start = None

        self.loops(others, self.pragma(len(others)) if many else "", tile)

    def _register_width(self, w: Var) -> int:
        """How many vectors of the outer variable fit registers together (0: use arrays in memory)."""
        plain = all(
            not isinstance(s.source, Scan) and not (isinstance(s.source, Reduce) and s.source.kind.startswith("arg"))
            for p in self.fk.phases
            for s in p.body
        )
        if not plain or self.fk.kernel.scratch or not isinstance(w.extent, int) or w.extent % self.lanes:
            return 0
        reduces = max(sum(isinstance(s.source, Reduce) for s in p.body) for p in self.fk.phases)
        most = self.target.budgets.sums
        return next((q for q in (8, 4, 2) if w.extent // self.lanes % q == 0 and q * reduces <= most), 0)

    def _register_tiles(self, w: Var, others: list[Var], many: bool, width: int) -> None:
        """Columns in groups of `width` vectors, whose accumulators stay in registers while the rows stream by once."""
        self.register_lane = True

        def tile() -> None:
            if not many and (pragma := self.pragma(1)):
                self.line(pragma)
            with self.block(f"for (int64_t tile = 0; tile < {self.size(w.extent)}; tile += {width} * VL)"):
                for k, phase in enumerate(self.fk.phases):
                    RegisterPhase(self, phase, w, width).write(k)

        self.loops(others, self.pragma(len(others)) if many else "", tile)
