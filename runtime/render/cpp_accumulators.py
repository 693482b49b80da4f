"""Accumulators of reductions and scans in C++: how they start, take a value, and end in the kernel's register."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.index import Expr, of, product
from ..ir.nodes import Node, index_node
from ..kernels.plan import Reduce, Scan
from ..tile.loops import FlatPhase, FlatStatement, best_inner
from .cpp import BLOCK, COMPUTE
from .cpp_loops import LoopWriter


class AccumulatorWriter(LoopWriter):
    # -- what a reduction needs ----------------------------------------------------------------------------------------
    def inexact(self, s: FlatStatement) -> bool:
        """A float sum or product: the order of its steps shows in the result."""
        return (
            isinstance(s.source, Reduce) and s.source.kind in self.tables.inexact and s.source.dtype.startswith("float")
        )

    def total_dtype(self, s: FlatStatement) -> str:
        """The dtype of the running total of a long sum."""
        assert isinstance(s.source, Reduce)
        return self.tables.total(s.source.kind, s.source.dtype)

    def has_long_sum(self, phase: FlatPhase) -> bool:
        """Whether float sums go through partial sums of BLOCK steps."""
        depth = product(v.extent for v in phase.inner)
        return any(self.inexact(s) for s in phase.body) and not (isinstance(depth, int) and depth <= BLOCK)

    def wide(self, phase: FlatPhase, lanes: bool) -> frozenset[str]:
        """Registers whose long float sums are kept in double from one block of steps to the next: exact enough at no cost."""
        v = best_inner(phase)
        steps = product(u.extent for u in phase.inner if u is not v) * (
            -(-v.extent // self.lanes) if lanes else v.extent
        )
        if isinstance(steps, int) and steps <= BLOCK:
            return frozenset()
        return frozenset(s.source.name for s in phase.body if isinstance(s.source, Reduce) and self.inexact(s))

    def compensated(self, s: FlatStatement, wide: frozenset[str]) -> bool:
        """A long sum for which there is no wider type: what its total loses by rounding is kept beside it."""
        source = s.source
        return isinstance(source, Reduce) and source.name in wide and self.tables.compensated(source.kind, source.dtype)

    def open_accumulators(
        self, reduces: list[FlatStatement], lanes: bool, wide: frozenset[str] = frozenset()
    ) -> dict[str, str]:
        accs: dict[str, str] = {}
        for s in reduces:
            assert isinstance(s.source, Reduce)
            acc = accs[s.source.name] = self.fresh("acc")
            dtype = self.total_dtype(s) if s.source.name in wide else self.acc_dtype(s)
            start = self.tables.identity(s.source.kind, dtype)
            ctype = COMPUTE[dtype]
            low = f", {acc}_low = {acc}" if self.compensated(s, wide) else ""
            self.line(f"auto {acc} = splat<{ctype}>({start}){low};" if lanes else f"{ctype} {acc} = {start}{low};")
            if s.source.kind.startswith("arg"):
                self.line(f"auto {acc}_at = splat<int64_t>(0);" if lanes else f"int64_t {acc}_at = 0;")
                self.line(f"auto {acc}_any = no_lanes();" if lanes else f"bool {acc}_any = false;")
        return accs

    @staticmethod
    def acc_dtype(s: FlatStatement) -> str:
        assert isinstance(s.source, Reduce)
        return s.value.dtype if s.source.kind.startswith("arg") else s.source.dtype

    def close_accumulators(
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
                total = f"with_low({acc}, {acc}_low)" if self.compensated(s, wide) else acc
                total = self.tables.horizontal(s.source.kind, total) if lanes else total
                wider = target is not None and s.source.name in wide
                ctype = COMPUTE[self.total_dtype(s) if wider else s.source.dtype]
                self.line(f"{name} = {ctype}({total});")

    def accumulate(self, s: FlatStatement, acc: str, position: Node | None) -> None:
        assert isinstance(s.source, Reduce)
        text, is_vector = self.value(s.value)
        kind, dtype = s.source.kind, self.acc_dtype(s)
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

    def position(self, phase: FlatPhase) -> Node | None:
        if not any(isinstance(s.source, Reduce) and s.source.kind.startswith("arg") for s in phase.body):
            return None
        total: int | Expr = 0
        for u in phase.inner:
            total = total * u.extent + of(u)
        return index_node(total)

    # -- scans ---------------------------------------------------------------------------------------------------------
    def open_scans(self, scans: list[FlatStatement]) -> dict[int, str]:
        runs: dict[int, str] = {}
        for s in scans:
            assert isinstance(s.source, Scan)
            run = runs[id(s)] = self.fresh("run")
            self.line(f"{self.run_type(s)} {run} = {self.tables.identity(s.source.kind, s.value.dtype)};")
        return runs

    def run_type(self, s: FlatStatement) -> str:
        # A running float sum is kept in double, as eager does.
        assert isinstance(s.source, Scan)
        return COMPUTE[self.tables.total(s.source.kind, s.value.dtype, scan=True)]

    def scan_vector(self, s: FlatStatement, run: str) -> None:
        assert isinstance(s.source, Scan)
        text, is_vector = self.value(s.value)
        if not is_vector:
            text = f"splat<{COMPUTE[s.value.dtype]}>({text})"
        ctype = self.run_type(s)
        self.line(f"{run} = {self.tables.combine(s.source.kind, s.value.dtype, run, f'cast<{ctype}>({text})', True)};")
        out = f"cast<{COMPUTE[s.value.dtype]}>({run})"
        if s.source.buffer in self.tile_shapes and self.choice.mode == "outer":
            self._store_in_tile(s, s.source.buffer, out)
            return
        where = self.where(s)
        assert s.where is not None
        assert self.lane_var is not None
        n = f", {self.count}" if self.count is not None else ""
        if s.where.coefficient(self.lane_var) == 1:
            self.line(f"storeu({s.source.buffer} + {where}, {out}{n});")
        else:
            live = f"lane_mask({self.count})" if self.count is not None else "all_lanes()"
            self.line(f"scatter({s.source.buffer}, {self.index_vector(s.where)}, {out}, {live});")
