"""One phase of a tile of columns in C++: each column has accumulators of its own, in registers or in arrays.

A float sum that is long goes through partial sums of BLOCK steps, which are added to totals of a wider dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..ir.index import Var
from ..kernels.plan import Reduce, Scan
from ..tile.loops import FlatPhase, FlatStatement
from .cpp import BLOCK, COMPUTE
from .cpp_accumulators import AccumulatorWriter


class ColumnPhase:
    """Reductions over the inner loops of a phase, for the columns of a tile of `var`.

    names    the array that holds each result; partial, totals  those of partial sums and of totals, of sums that are long.
    """

    def __init__(self, writer: AccumulatorWriter, phase: FlatPhase, var: Var) -> None:
        self.writer, self.phase, self.var = writer, phase, var
        self.inner = list(phase.inner)
        self.reduces = [s for s in phase.body if isinstance(s.source, Reduce)]
        self.sums = [s for s in self.reduces if writer.inexact(s)]
        self.is_long = writer.has_long_sum(phase)
        self.names = {s.source.name: s.source.name for s in self.reduces if isinstance(s.source, Reduce)}
        self.partial: dict[str, str] = {}
        self.totals: dict[str, str] = {}

    def name_totals(self, reduce: Reduce) -> None:
        self.partial[reduce.name] = self.writer.fresh("part")
        self.totals[reduce.name] = self.writer.fresh("total")


class RegisterPhase(ColumnPhase):
    """Accumulators of `width` vectors, in registers."""

    def __init__(self, writer: AccumulatorWriter, phase: FlatPhase, var: Var, width: int) -> None:
        super().__init__(writer, phase, var)
        self.width = width

    def write(self, number: int) -> None:
        self._declare()
        self._fill({n: a for n, a in self.names.items() if n not in self.totals})
        self._fill(self.totals, total=True)
        with self.writer.block("", after_writes=number > 0):
            if self.is_long:
                self.writer.loops(self.inner[:-1], "", self._blocks)
                self._finish()
            else:
                self.writer.loops(self.inner, "", lambda: self._each(self._body))

    def _declare(self) -> None:
        writer = self.writer
        for s in self.reduces:
            assert isinstance(s.source, Reduce)
            writer.line(f"Reg<{COMPUTE[s.source.dtype]}> {s.source.name}[{self.width}];")
            if self.is_long and s in self.sums:
                self.name_totals(s.source)
                writer.line(f"Reg<{COMPUTE[s.source.dtype]}> {self.partial[s.source.name]}[{self.width}];")
                writer.line(f"Reg<{COMPUTE[writer.total_dtype(s)]}> {self.totals[s.source.name]}[{self.width}];")

    def _fill(self, which: Mapping[str, str], total: bool = False) -> None:
        """Start these accumulators."""
        for s in self.reduces:
            assert isinstance(s.source, Reduce)
            if s.source.name in which:
                dtype = self.writer.total_dtype(s) if total else self.writer.acc_dtype(s)
                start = self.writer.tables.identity(s.source.kind, dtype)
                self._for_all(f"{which[s.source.name]}[q] = splat<{COMPUTE[dtype]}>({start});")

    def _for_all(self, text: str) -> None:
        self.writer.line(f"for (int q = 0; q < {self.width}; ++q) {text}")

    def _each(self, body: Callable[[], None]) -> None:
        """The body for each vector of the tile, unrolled."""
        w, writer = self.var, self.writer
        writer.line(f"#pragma GCC unroll {self.width}")
        with writer.block(f"for (int q = 0; q < {self.width}; ++q)", w):
            writer.line(f"const int64_t {w.name} = tile + q * VL;")
            writer.lane_var, writer.count = w, None
            body()
            writer.lane_var = None

    def _body(self) -> None:
        target = {**self.names, **self.partial}
        for s in self.phase.body:
            if isinstance(s.source, Reduce):
                self.writer.accumulate(s, f"{target[s.source.name]}[q]", None)
            else:
                self.writer.store_vector(s)

    def _blocks(self) -> None:
        writer, last = self.writer, self.inner[-1]
        v, n = last.name, writer.size(last.extent)
        with writer.block(f"for (int64_t {v}_b = 0; {v}_b < {n}; {v}_b += {BLOCK})"):
            self._fill(self.partial)
            writer.line(f"const int64_t {v}_e = {v}_b + {BLOCK} < {n} ? {v}_b + {BLOCK} : {n};")
            with writer.block(f"for (int64_t {v} = {v}_b; {v} < {v}_e; ++{v})", last):
                self._each(self._body)
            for s in self.sums:
                assert isinstance(s.source, Reduce)
                dtype = writer.total_dtype(s)
                total = f"{self.totals[s.source.name]}[q]"
                part = f"cast<{COMPUTE[dtype]}>({self.partial[s.source.name]}[q])"
                self._for_all(f"{total} = {writer.tables.combine(s.source.kind, dtype, total, part, True)};")

    def _finish(self) -> None:
        for s in self.sums:
            assert isinstance(s.source, Reduce)
            name, ctype = s.source.name, COMPUTE[s.source.dtype]
            self._for_all(f"{name}[q] = cast<{ctype}>({self.totals[name]}[q]);")


class ArrayPhase(ColumnPhase):
    """Accumulators in arrays in memory, for the columns from `start` up to `end`: any number of them, and of reductions and scans."""

    def __init__(self, writer: AccumulatorWriter, phase: FlatPhase, var: Var, start: str, end: str) -> None:
        super().__init__(writer, phase, var)
        self.start, self.end = start, end
        self.position = writer.position(phase)
        self.runs: dict[int, str] = {}  # running values of scans, by the identity of their statements

    def write(self, number: int) -> None:
        self._declare()
        self._declare_scans()
        with self.writer.block("", after_writes=number > 0):
            if self.is_long:
                self._declare_totals()
                self.writer.loops(self.inner[:-1], "", self._blocks)
                for name, total in self.totals.items():
                    self._for_all(f"{name}[q] = {total}[q];")
            else:
                self.writer.loops(self.inner, "", lambda: self._lanes(self.names), after_writes=number > 0)

    def _for_all(self, text: str) -> None:
        self.writer.line(f"for (int q = 0; q < {self.writer.tile}; ++q) {text}")

    def _declare(self) -> None:
        writer, n = self.writer, self.writer.tile
        for s in self.reduces:
            assert isinstance(s.source, Reduce)
            name, kind, dtype = s.source.name, s.source.kind, writer.acc_dtype(s)
            ctype = COMPUTE[dtype] if dtype != "bool" else "bool8"
            start = writer.tables.identity(kind, dtype)
            if kind.startswith("arg"):
                writer.line(
                    f"alignas(64) int64_t {name}[{n}]; alignas(64) {ctype} {name}_v[{n}]; alignas(64) bool8 {name}_any[{n}];"
                )
                self._for_all(f"{name}[q] = 0;")
                self._for_all(f"{name}_any[q] = bool8{{0}};")
                self._for_all(f"{name}_v[q] = {start};")
            else:
                writer.line(f"alignas(64) {ctype} {name}[{n}];")
                self._for_all(f"{name}[q] = cast<{ctype}>({COMPUTE[dtype]}({start}));")

    def _declare_scans(self) -> None:
        writer = self.writer
        for s in self.phase.body:
            if isinstance(s.source, Scan):
                run = self.runs[id(s)] = writer.fresh("run")
                writer.line(f"alignas(64) {writer.run_type(s)} {run}[{writer.tile}];")
                self._for_all(f"{run}[q] = {writer.tables.identity(s.source.kind, s.value.dtype)};")

    def _declare_totals(self) -> None:
        writer = self.writer
        for s in self.sums:
            assert isinstance(s.source, Reduce)
            self.name_totals(s.source)
            dtype, total = writer.total_dtype(s), self.totals[s.source.name]
            writer.line(f"alignas(64) {COMPUTE[s.source.dtype]} {self.partial[s.source.name]}[{writer.tile}];")
            writer.line(f"alignas(64) {COMPUTE[dtype]} {total}[{writer.tile}];")
            self._for_all(f"{total}[q] = {writer.tables.identity(s.source.kind, dtype)};")

    def _blocks(self) -> None:
        writer, last = self.writer, self.inner[-1]
        v, n = last.name, writer.size(last.extent)
        with writer.block(f"for (int64_t {v}_b = 0; {v}_b < {n}; {v}_b += {BLOCK})"):
            for s in self.sums:
                assert isinstance(s.source, Reduce)
                start = writer.tables.identity(s.source.kind, s.source.dtype)
                self._for_all(f"{self.partial[s.source.name]}[q] = {start};")
            stop = f"({v}_b + {BLOCK} < {n} ? {v}_b + {BLOCK} : {n})"
            with writer.block(f"for (int64_t {v} = {v}_b; {v} < {stop}; ++{v})", last):
                self._lanes({**self.names, **self.partial})
            for s in self.sums:
                assert isinstance(s.source, Reduce)
                dtype, total = writer.total_dtype(s), f"{self.totals[s.source.name]}[q]"
                part = f"{COMPUTE[dtype]}({self.partial[s.source.name]}[q])"
                self._for_all(f"{total} = {writer.tables.combine(s.source.kind, dtype, total, part, False)};")

    def _lanes(self, target: Mapping[str, str]) -> None:
        """One step of the rows, for all columns."""
        self.writer.vector_loop(self.var, self.start, self.end, lambda: self._body(target))

    def _body(self, target: Mapping[str, str]) -> None:
        writer, lane = self.writer, f"{self.var.name} - {self.start}"
        for s in self.phase.body:
            if isinstance(s.source, Reduce):
                self._accumulate(s, target[s.source.name], lane)
            elif isinstance(s.source, Scan):
                acc, run = writer.fresh("r"), self.runs[id(s)]
                writer.line(f"auto {acc} = loadu({run} + ({lane}));")
                writer.scan_vector(s, acc)
                writer.line(f"storeu({run} + ({lane}), {acc});")
            else:
                writer.store_vector(s)

    def _accumulate(self, s: FlatStatement, array: str, lane: str) -> None:
        assert isinstance(s.source, Reduce)
        writer = self.writer
        acc = writer.fresh("a")
        if s.source.kind.startswith("arg"):
            writer.line(
                f"auto {acc} = loadu({array}_v + ({lane})); auto {acc}_at = loadu({array} + ({lane})); "
                f"auto {acc}_any = loadu({array}_any + ({lane}));"
            )
            writer.accumulate(s, acc, self.position)
            writer.line(
                f"storeu({array}_v + ({lane}), {acc}); storeu({array} + ({lane}), {acc}_at); storeu({array}_any + ({lane}), {acc}_any);"
            )
            return
        writer.line(f"auto {acc} = loadu({array} + ({lane}));")
        writer.accumulate(s, acc, self.position)
        writer.line(f"storeu({array} + ({lane}), {acc});")
