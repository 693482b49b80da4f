"""C++ loops whose lanes run over an outer variable: pointwise kernels, short windows, and reductions of columns."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

from ..ir.index import Var, product
from ..ir.nodes import Node
from ..kernels.plan import Reduce, Scan
from ..tile.loops import FlatPhase, FlatStatement
from .cpp import BLOCK, COMPUTE
from .cpp_rows import RowWriter

NEAR = 4
"""Points at most of a loop inside of the lanes'."""


class OuterWriter(RowWriter):
    """The shapes `lanes` and `tile`."""

    def has_long_sum(self, phase: FlatPhase) -> bool:
        """Whether float sums go through partial sums of BLOCK steps."""
        depth = product(v.extent for v in phase.inner)
        return any(self._inexact(s) for s in phase.body) and not (isinstance(depth, int) and depth <= BLOCK)

    # -- lanes over an outer variable ----------------------------------------------------------------------------------
    def _lanes(self) -> None:
        w = self.choice.var
        assert w is not None
        near = self._near(w)
        others = [v for v in self.fk.outer if v is not w and v not in near]
        many = bool(others) and self._enough(others)

        def point() -> None:
            self._tile_arrays(self.lanes)
            for k, phase in enumerate(self.fk.phases):
                write = functools.partial(self._lane_phase, phase, k)
                self._loops(near, f"#pragma GCC unroll {NEAR}" if near else "", write)

        def inside() -> None:
            self._vector_loop(w, "0", w.extent, point, "" if many else self._pragma(1))

        self._loops(others, self._pragma(len(others)) if many else "", inside)

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

        short = [v for v in self.fk.outer if v is not w and isinstance(v.extent, int) and v.extent <= NEAR]
        found = [v for v in short if inside(v)]
        return found if math.prod(int(v.extent) for v in found) <= NEAR else []

    def _lane_phase(self, phase: FlatPhase, number: int) -> None:
        reduces = [s for s in phase.body if isinstance(s.source, Reduce)]
        scans = [s for s in phase.body if isinstance(s.source, Scan)]
        position = self._position(phase)
        accs: dict[str, str] = {}
        # Registers of this shape are vectors, named like the register itself: declared in the scope of the outer point.
        for s in reduces:
            accs |= self._open_accumulators([s], True)
        runs: dict[int, str] = {}
        for s in scans:
            assert isinstance(s.source, Scan)
            runs[id(s)] = self.fresh("run")
            self.line(
                f"auto {runs[id(s)]} = splat<{self._run_type(s)}>({self.tables.identity(s.source.kind, s.value.dtype)});"
            )

        def body(names: dict[str, str]) -> None:
            for s in phase.body:
                if isinstance(s.source, Reduce):
                    self._accumulate(s, names[s.source.name], position)
                elif isinstance(s.source, Scan):
                    self._scan_vector(s, runs[id(s)])
                else:
                    self._store_vector(s)

        def blocks() -> None:
            last = phase.inner[-1]
            sums = [s for s in reduces if self._inexact(s)]
            b, n = f"{last.name}_b", self.size(last.extent)
            with self.block(f"for (int64_t {b} = 0; {b} < {n}; {b} += {BLOCK})"):
                partial = self._open_accumulators(sums, True)
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
                self._loops(list(phase.inner[:-1]), "", blocks, after_writes=number > 0)
            else:
                self._loops(list(phase.inner), "", lambda: body(accs), after_writes=number > 0)
        for s in reduces:
            assert isinstance(s.source, Reduce)
            acc = accs[s.source.name]
            self.line(f"const auto {s.source.name} = {f'{acc}_at' if s.source.kind.startswith('arg') else acc};")

    def _scan_vector(self, s: FlatStatement, run: str) -> None:
        assert isinstance(s.source, Scan)
        text, is_vector = self.value(s.value)
        if not is_vector:
            text = f"splat<{COMPUTE[s.value.dtype]}>({text})"
        ctype = self._run_type(s)
        self.line(f"{run} = {self.tables.combine(s.source.kind, s.value.dtype, run, f'cast<{ctype}>({text})', True)};")
        out = f"cast<{COMPUTE[s.value.dtype]}>({run})"
        if s.source.buffer in self.tile_shapes and self.choice.mode == "outer":
            self._store_in_tile(s, s.source.buffer, out)
            return
        where = self._where(s)
        assert s.where is not None
        assert self.lane_var is not None
        n = f", {self.count}" if self.count is not None else ""
        if s.where.coefficient(self.lane_var) == 1:
            self.line(f"storeu({s.source.buffer} + {where}, {out}{n});")
        else:
            live = f"lane_mask({self.count})" if self.count is not None else "all_lanes()"
            self.line(f"scatter({s.source.buffer}, {self.index_vector(s.where)}, {out}, {live});")

    # -- tiles of an outer variable ------------------------------------------------------------------------------------
    def _tiles(self) -> None:
        w = self.choice.var
        assert w is not None
        others = [v for v in self.fk.outer if v is not w]
        biggest = max([1, *(int(n) for b in self.fk.kernel.scratch if isinstance(n := product(b.shape), int))])
        while self.tile > self.lanes and self.tile * biggest > self.target.budgets.tile:
            self.tile //= 2
        many = bool(others) and self._enough(others)
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
            if not many and (pragma := self._pragma(1)):
                self.line(pragma)
            with self.block(f"for (int64_t {start} = 0; {start} < {self.size(w.extent)}; {start} += {self.tile})"):
                self.line(
                    f"const int64_t {end} = {start} + {self.tile} < {self.size(w.extent)} ? {start} + {self.tile} : {self.size(w.extent)};"
                )
                self.tile_start = start
                self._tile_arrays(self.tile)
                for k, phase in enumerate(self.fk.phases):
                    self._tile_phase(phase, k, w, start, end)
                self.tile_start = None

        self._loops(others, self._pragma(len(others)) if many else "", tile)

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
        return next((q for q in (8, 4, 2) if w.extent // self.lanes % q == 0 and q * reduces <= 8), 0)

    def _register_tiles(self, w: Var, others: list[Var], many: bool, width: int) -> None:
        """Columns in groups of `width` vectors, whose accumulators stay in registers while the rows stream by once."""
        self.register_lane = True

        def each(body: Callable[[], None]) -> None:
            self.line(f"#pragma GCC unroll {width}")
            with self.block(f"for (int q = 0; q < {width}; ++q)", w):
                self.line(f"const int64_t {w.name} = tile + q * VL;")
                self.lane_var, self.count = w, None
                body()
                self.lane_var = None

        def phase_code(phase: FlatPhase, number: int) -> None:
            reduces = [s for s in phase.body if isinstance(s.source, Reduce)]
            names = {s.source.name: s.source.name for s in reduces if isinstance(s.source, Reduce)}
            partial: dict[str, str] = {}
            inner = list(phase.inner)
            last = inner[-1] if inner else None
            sums = [s for s in reduces if self._inexact(s)]
            cascade = self.has_long_sum(phase)
            wide: dict[str, str] = {}

            def fill(which: Mapping[str, str], total: bool = False) -> None:
                for s in reduces:
                    assert isinstance(s.source, Reduce)
                    if s.source.name in which:
                        d = self._total(s) if total else self._acc_dtype(s)
                        start = self.tables.identity(s.source.kind, d)
                        self.line(
                            f"for (int q = 0; q < {width}; ++q) {which[s.source.name]}[q] = splat<{COMPUTE[d]}>({start});"
                        )

            for s in reduces:
                assert isinstance(s.source, Reduce)
                self.line(f"Reg<{COMPUTE[s.source.dtype]}> {s.source.name}[{width}];")
                if cascade and s in sums:
                    partial[s.source.name], wide[s.source.name] = self.fresh("part"), self.fresh("total")
                    self.line(f"Reg<{COMPUTE[s.source.dtype]}> {partial[s.source.name]}[{width}];")
                    self.line(f"Reg<{COMPUTE[self._total(s)]}> {wide[s.source.name]}[{width}];")
            fill({n: a for n, a in names.items() if n not in wide})
            fill(wide, total=True)

            def body() -> None:
                target = {**names, **partial}
                for s in phase.body:
                    if isinstance(s.source, Reduce):
                        self._accumulate(s, f"{target[s.source.name]}[q]", None)
                    else:
                        self._store_vector(s)

            with self.block("", after_writes=number > 0):
                if not cascade:
                    self._loops(inner, "", lambda: each(body))
                    return
                assert last is not None

                def blocks() -> None:
                    n = self.size(last.extent)
                    with self.block(f"for (int64_t {last.name}_b = 0; {last.name}_b < {n}; {last.name}_b += {BLOCK})"):
                        fill(partial)
                        self.line(
                            f"const int64_t {last.name}_e = {last.name}_b + {BLOCK} < {n} ? {last.name}_b + {BLOCK} : {n};"
                        )
                        with self.block(
                            f"for (int64_t {last.name} = {last.name}_b; {last.name} < {last.name}_e; ++{last.name})",
                            last,
                        ):
                            each(body)
                        for s in sums:
                            assert isinstance(s.source, Reduce)
                            a, b = (
                                f"{wide[s.source.name]}[q]",
                                f"cast<{COMPUTE[self._total(s)]}>({partial[s.source.name]}[q])",
                            )
                            self.line(
                                f"for (int q = 0; q < {width}; ++q) {a} = {self.tables.combine(s.source.kind, self._total(s), a, b, True)};"
                            )

                self._loops(inner[:-1], "", blocks)
                for name, total in wide.items():
                    dtype = next(s.source.dtype for s in sums if isinstance(s.source, Reduce) and s.source.name == name)
                    self.line(f"for (int q = 0; q < {width}; ++q) {name}[q] = cast<{COMPUTE[dtype]}>({total}[q]);")

        def tile() -> None:
            if not many and (pragma := self._pragma(1)):
                self.line(pragma)
            with self.block(f"for (int64_t tile = 0; tile < {self.size(w.extent)}; tile += {width} * VL)"):
                for k, phase in enumerate(self.fk.phases):
                    phase_code(phase, k)

        self._loops(others, self._pragma(len(others)) if many else "", tile)

    def _tile_phase(self, phase: FlatPhase, number: int, w: Var, start: str, end: str) -> None:
        reduces = [s for s in phase.body if isinstance(s.source, Reduce)]
        scans = [s for s in phase.body if isinstance(s.source, Scan)]
        position = self._position(phase)
        names: dict[str, str] = {}

        def fill(array: str, ctype: str, value: str) -> None:
            self.line(f"for (int q = 0; q < {self.tile}; ++q) {array}[q] = {value};")

        for s in reduces:
            assert isinstance(s.source, Reduce)
            name = names[s.source.name] = s.source.name
            kind, dtype = s.source.kind, self._acc_dtype(s)
            ctype = COMPUTE[dtype] if dtype != "bool" else "bool8"
            if kind.startswith("arg"):
                self.line(
                    f"alignas(64) int64_t {name}[{self.tile}]; alignas(64) {ctype} {name}_v[{self.tile}]; alignas(64) bool8 {name}_any[{self.tile}];"
                )
                fill(name, "int64_t", "0")
                fill(f"{name}_any", "bool8", "bool8{0}")
                fill(f"{name}_v", ctype, self.tables.identity(kind, dtype))
            else:
                self.line(f"alignas(64) {ctype} {name}[{self.tile}];")
                fill(name, ctype, f"cast<{ctype}>({COMPUTE[dtype]}({self.tables.identity(kind, dtype)}))")
        runs: dict[int, str] = {}
        for s in scans:
            assert isinstance(s.source, Scan)
            run = runs[id(s)] = self.fresh("run")
            self.line(f"alignas(64) {self._run_type(s)} {run}[{self.tile}];")
            fill(run, self._run_type(s), self.tables.identity(s.source.kind, s.value.dtype))
        sums = [s for s in reduces if self._inexact(s)]
        inner = list(phase.inner)
        last = inner[-1] if inner else None
        cascade = self.has_long_sum(phase)

        def body(target: dict[str, str]) -> None:
            lane = f"{w.name} - {start}"
            for s in phase.body:
                if isinstance(s.source, Reduce):
                    self._accumulate_array(s, target[s.source.name], lane, position)
                elif isinstance(s.source, Scan):
                    acc = self.fresh("r")
                    self.line(f"auto {acc} = loadu({runs[id(s)]} + ({lane}));")
                    self._scan_vector(s, acc)
                    self.line(f"storeu({runs[id(s)]} + ({lane}), {acc});")
                else:
                    self._store_vector(s)

        def lanes_loop(target: dict[str, str]) -> None:
            self._vector_loop(w, start, end, lambda: body(target))

        with self.block("", after_writes=number > 0):
            if not cascade:
                self._loops(inner, "", lambda: lanes_loop(names), after_writes=number > 0)
                return
            assert last is not None
            partial: dict[str, str] = {}
            wide: dict[str, str] = {}
            for s in sums:
                assert isinstance(s.source, Reduce)
                partial[s.source.name], wide[s.source.name] = self.fresh("part"), self.fresh("total")
                self.line(f"alignas(64) {COMPUTE[s.source.dtype]} {partial[s.source.name]}[{self.tile}];")
                total = self._total(s)
                self.line(f"alignas(64) {COMPUTE[total]} {wide[s.source.name]}[{self.tile}];")
                fill(wide[s.source.name], COMPUTE[total], self.tables.identity(s.source.kind, total))

            def blocks() -> None:
                size = self.size(last.extent)
                with self.block(f"for (int64_t {last.name}_b = 0; {last.name}_b < {size}; {last.name}_b += {BLOCK})"):
                    for s in sums:
                        assert isinstance(s.source, Reduce)
                        fill(partial[s.source.name], "", self.tables.identity(s.source.kind, s.source.dtype))
                    stop = f"({last.name}_b + {BLOCK} < {size} ? {last.name}_b + {BLOCK} : {size})"
                    with self.block(
                        f"for (int64_t {last.name} = {last.name}_b; {last.name} < {stop}; ++{last.name})", last
                    ):
                        lanes_loop({**names, **partial})
                    for s in sums:
                        assert isinstance(s.source, Reduce)
                        a, b = wide[s.source.name], partial[s.source.name]
                        total = self._total(s)
                        combined = self.tables.combine(
                            s.source.kind, total, f"{a}[q]", f"{COMPUTE[total]}({b}[q])", False
                        )
                        self.line(f"for (int q = 0; q < {self.tile}; ++q) {a}[q] = {combined};")

            self._loops(inner[:-1], "", blocks)
            for name, total in wide.items():
                self.line(f"for (int q = 0; q < {self.tile}; ++q) {name}[q] = {total}[q];")

    def _accumulate_array(self, s: FlatStatement, array: str, lane: str, position: Node | None) -> None:
        assert isinstance(s.source, Reduce)
        acc = self.fresh("a")
        if s.source.kind.startswith("arg"):
            self.line(
                f"auto {acc} = loadu({array}_v + ({lane})); auto {acc}_at = loadu({array} + ({lane})); "
                f"auto {acc}_any = loadu({array}_any + ({lane}));"
            )
            self._accumulate(s, acc, position)
            self.line(
                f"storeu({array}_v + ({lane}), {acc}); storeu({array} + ({lane}), {acc}_at); storeu({array}_any + ({lane}), {acc}_any);"
            )
            return
        self.line(f"auto {acc} = loadu({array} + ({lane}));")
        self._accumulate(s, acc, position)
        self.line(f"storeu({array} + ({lane}), {acc});")
