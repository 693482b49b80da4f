"""C++ loops over groups of rows: reductions along rows where some buffers are contiguous across the rows (`softmax(x + y.t(), -1)`).

For each group what is read across is transposed into strips, one for each row; then every row is done as in the shape `rows`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from ..ir.index import Expr, Var, expr, of, product
from ..ir.nodes import ITEMSIZE, Node
from ..kernels.plan import Scan
from ..tile.loops import FlatPhase, FlatStatement, Lanes
from .cpp import COMPUTE, MEMORY
from .cpp_tiles import TileWriter, ceil_div, is_transposed


@dataclass
class Strips:
    """Groups of `group` rows along `rows`; for each load that is transposed its buffer, flat index and inner variable."""

    rows: Var
    group: int = 0
    loads: dict[Node, tuple[str, Expr, Var]] = field(default_factory=dict)
    arrays: dict[tuple[str, Expr, Var], str] = field(default_factory=dict)


class StripWriter(TileWriter):
    """The shape `strips`."""

    strips: Strips | None = None

    # -- choice --------------------------------------------------------------------------------------------------------
    def find_strips(self) -> Strips | None:
        """A kernel with some accesses along its rows and some across them, or None. Lanes then run along the rows."""
        fk = self.fk
        phases = [p for p in fk.phases if p.inner]
        if not phases or self.choice.mode == "none" or fk.kernel.serial:
            return None
        if any(
            len(p.inner) > 1 or not isinstance(p.inner[0].extent, int) or p.inner[0].extent < self.lanes for p in phases
        ):
            return None
        if any(isinstance(s.source, Scan) for p in phases for s in p.body):
            return None
        for u in reversed(fk.outer):
            found = Strips(u)
            unit = [self._along(found, p) for p in phases]
            if any(unit) and found.loads and self._settled(found, phases):
                return found
        return None

    def _along(self, found: Strips, phase: FlatPhase) -> bool:
        """Collects the loads of a phase that are read across; whether any other access is contiguous along the rows."""
        v, u = phase.inner[0], found.rows
        unit = False
        for s in phase.body:
            for n in _loads(s):
                if not n.attr.index:
                    continue
                e = n.attr.index[0]
                if (
                    not n.args
                    and not self.local(n)
                    and e.coefficient(u) == 1
                    and is_transposed(e, u, v, 1, self.target.limits.line)
                ):
                    found.loads[n] = n.attr.buffer, e, v
                else:
                    unit = unit or e.coefficient(v) == 1
            unit = unit or (s.where is not None and s.where.coefficient(v) == 1)
        return unit

    def _settled(self, found: Strips, phases: list[FlatPhase]) -> bool:
        """Whether the other accesses suit lanes along the rows, and the strips have room and give every thread work."""
        for p in phases:
            for s in p.body:
                others = [n.attr.index[0] for n in _loads(s) if n not in found.loads and n.attr.index]
                others += [] if s.where is None else [s.where]
                if any(e.coefficient(p.inner[0]) not in (expr(0), expr(1)) for e in others):
                    return False
        sizes = {key: ITEMSIZE[n.dtype] for n, key in found.loads.items()}
        found.group = max(self.target.limits.line // min(sizes.values()), self.lanes)
        bytes_ = sum(product([key[2].extent]) * size for key, size in sizes.items()) * found.group
        groups = product(v.extent if v is not found.rows else ceil_div(v, found.group) for v in self.fk.outer)
        return int(bytes_) <= self.target.budgets.strips and (not isinstance(groups, int) or groups >= self.threads)

    # -- code ----------------------------------------------------------------------------------------------------------
    def _grouped_rows(self, plan: Strips) -> None:
        u, group = plan.rows, plan.group
        self.choice, self.strips = Lanes("inner"), plan
        start = Var(f"{u.name}_t", u.extent)
        loops = [*(v for v in self.fk.outer if v is not u), start]
        pragma = self.pragma(len(loops))
        with ExitStack() as open_blocks:
            if pragma:
                self.line(pragma)
            for v in loops:
                advance = f"{v.name} += {group}" if v is start else f"++{v.name}"
                head = f"for (int64_t {v.name} = 0; {v.name} < {self.size(v.extent)}; {advance})"
                open_blocks.enter_context(self.block(head, v, sealed=bool(pragma) and v is not start))
            end = self._end(u, start.name, group)
            for n, key in plan.loads.items():
                if key in plan.arrays:
                    continue
                buffer, e, v = key
                name = plan.arrays[key] = self.fresh("strips")
                c = e.coefficient(v)
                assert c is not None
                corner = self.address(e.subst({u: of(start), v: 0}))
                self.line(f"alignas(64) {MEMORY[n.dtype]} {name}[{product([v.extent]) * group}];")
                self.line(
                    f"transpose({name}, {self.size(v.extent)}, {buffer} + {corner}, {self.address(c)}, "
                    f"{self.size(v.extent)}, {end} - {start.name});"
                )
            with self.block(f"for (int64_t {u.name} = {start.name}; {u.name} < {end}; ++{u.name})", u):
                self.line(f"const int64_t row = {u.name} - {start.name};")
                self.tile_arrays(1)
                for k, phase in enumerate(self.fk.phases):
                    self._row_phase(phase, k, False)
        self.strips = None

    def _load(self, node: Node, vector: bool) -> str:
        key = self.strips.loads.get(node) if self.strips is not None else None
        if self.strips is None or key is None:
            return super()._load(node, vector)
        at = f"{self.strips.arrays[key]} + row * {self.size(key[2].extent)} + {key[2].name}"
        if not vector:
            return f"cast<{COMPUTE[node.dtype]}>(*({at}))"
        return f"loadu({at}{f', {self.count}' if self.count is not None else ''})"


def _loads(s: FlatStatement) -> list[Node]:
    return [n for root in ((s.value,) if s.mask is None else (s.value, s.mask)) for n in root.loads()]
