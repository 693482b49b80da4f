"""C++ loops in transpose tiles over two outer variables: pointwise kernels with transposed accesses, across the lanes.

Lanes run over `w`; some accesses are contiguous along another variable `u` and jump from lane to lane (`y[w, u]` beside `x[u, w]`).
A tile of EDGE x EDGE points is done at once: what is read across goes through a small array, transposed by whole vectors on the way,
and what is written across leaves through one. So every access to memory is contiguous, and a cache line is used up while it is there.
Accesses that cannot be transposed (under a mask, say) still gain from the order of the tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from ..ir.index import Expr, Var, of, product
from ..ir.nodes import ITEMSIZE, Node
from ..kernels.plan import Reduce, Scan, Store
from ..tile.loops import FlatStatement
from .cpp import COMPUTE, MEMORY
from .cpp_outer import OuterWriter


@dataclass
class TransposeTiles:
    """How a kernel is cut in tiles over `rows` and the lane variable, and which accesses are transposed."""

    rows: Var
    edge: int
    loads: dict[Node, tuple[str, Expr]] = field(default_factory=dict)
    stores: list[FlatStatement] = field(default_factory=list)
    copies: list[FlatStatement] = field(default_factory=list)  # all that a kernel does, if not empty: no array between
    arrays: dict[tuple[str, Expr], str] = field(default_factory=dict)
    outs: dict[int, str] = field(default_factory=dict)  # by the identity of a statement in `stores`


class TileWriter(OuterWriter):
    """The shape `cross`."""

    transpose_tiles: TransposeTiles | None = None

    # -- choice --------------------------------------------------------------------------------------------------------
    def find_transpose_tiles(self) -> TransposeTiles | None:
        """Tiles for a kernel of independent points with accesses across its lanes, or None."""
        w, fk = self.choice.var, self.fk
        if w is None or fk.kernel.serial or fk.kernel.scratch or any(p.inner for p in fk.phases):
            return None
        statements = [s for p in fk.phases for s in p.body]
        if any(isinstance(s.source, (Reduce, Scan)) for s in statements):
            return None
        accesses = {(buffer, e): size for buffer, e, size in self._accesses(statements)}
        best: tuple[int, Var] | None = None
        for u in fk.outer:
            if u is w or (isinstance(u.extent, int) and u.extent < self.lanes):
                continue
            count = sum(is_transposed(e, u, w, size, self.target.limits.line) for (_, e), size in accesses.items())
            if count and (
                best is None or count >= best[0]
            ):  # of equals the innermost: nearest in memory for the others
                best = count, u
        if best is None:
            return None
        edges = [self.target.budgets.edge // n for n in (1, 2, 4)]
        found = TransposeTiles(best[1], edges[-1])
        self._find_transposed(found, statements, best[1], w)
        found.edge = next((n for n in edges if self._fits(found, n)), edges[-1])
        return found

    def _fits(self, found: TransposeTiles, edge: int) -> bool:
        """Whether the arrays of such tiles have room, and every thread has work."""
        bytes_ = sum({key: ITEMSIZE[n.dtype] for n, key in found.loads.items()}.values())
        bytes_ += sum(ITEMSIZE[self.stored_dtype(s)] for s in found.stores)
        tiles = product(
            v.extent if v not in (found.rows, self.choice.var) else ceil_div(v, edge) for v in self.fk.outer
        )
        return bytes_ * edge * edge <= self.target.budgets.tile and (
            not isinstance(tiles, int) or tiles >= 2 * self.threads
        )

    def _accesses(self, statements: list[FlatStatement]) -> Iterator[tuple[str, Expr, int]]:
        for s in statements:
            assert s.where is not None
            assert isinstance(s.source, Store)
            yield s.source.buffer, s.where, ITEMSIZE[self.stored_dtype(s)]
            for root in (s.value,) if s.mask is None else (s.value, s.mask):
                for n in root.loads():
                    yield n.attr.buffer, n.attr.index[0], ITEMSIZE[n.dtype]

    def _find_transposed(self, found: TransposeTiles, statements: list[FlatStatement], u: Var, w: Var) -> None:
        """Which loads and stores go through arrays."""
        loaded: set[str] = set()
        for s in statements:
            for root in (s.value,) if s.mask is None else (s.value, s.mask):
                for n in root.loads():
                    loaded.add(n.attr.buffer)
                    e = n.attr.index[0]
                    if (
                        not n.args
                        and not self.local(n)
                        and e.coefficient(u) == 1
                        and is_transposed(e, u, w, 1, self.target.limits.line)
                    ):
                        found.loads[n] = n.attr.buffer, e
        for s in statements:
            assert isinstance(s.source, Store)
            assert s.where is not None
            writers = [t for t in statements if not isinstance(t.source, Reduce) and t.source.buffer == s.source.buffer]
            if s.mask is not None or s.source.mode != "set" or s.source.atomic:
                continue
            # An array empties at the end of the tile: nobody may read the buffer before, nor write it in between.
            if s.source.buffer in loaded or len(writers) > 1:
                continue
            if s.where.coefficient(u) == 1 and is_transposed(s.where, u, w, 1, self.target.limits.line):
                found.stores.append(s)
            elif (
                s.value in found.loads
                and s.value.dtype == self.stored_dtype(s)
                and s.where.coefficient(w) == 1
                and s.where.coefficient(u) is not None
            ):
                found.copies.append(s)
        if len(found.copies) < len(statements):
            # A buffer may lie where another one that dies here did: only arrays read early and write late.
            found.copies.clear()

    # -- code ----------------------------------------------------------------------------------------------------------
    def _transpose_tiled(self, plan: TransposeTiles) -> None:
        u, w, edge = plan.rows, self.choice.var, plan.edge
        assert w is not None
        self.transpose_tiles = plan
        starts = {u: Var(f"{u.name}_t", u.extent), w: Var(f"{w.name}_t", w.extent)}
        loops = [(v, 1) for v in self.fk.outer if v is not u and v is not w] + [(starts[u], edge), (starts[w], edge)]
        pragma = self.pragma(len(loops))
        with ExitStack() as open_blocks:
            if pragma:
                self.line(pragma)
            for k, (v, step) in enumerate(loops):
                advance = f"++{v.name}" if step == 1 else f"{v.name} += {step}"
                head = f"for (int64_t {v.name} = 0; {v.name} < {self.size(v.extent)}; {advance})"
                open_blocks.enter_context(self.block(head, v, sealed=bool(pragma) and k < len(loops) - 1))
            self._tile(plan, w, starts)
        self.transpose_tiles = None

    def _tile(self, plan: TransposeTiles, w: Var, starts: dict[Var, Var]) -> None:
        u, edge = plan.rows, plan.edge
        ends = {v: self._end(v, starts[v].name, edge) for v in (u, w)}
        counts = {v: str(edge) if _whole(v, edge) else f"{ends[v]} - {starts[v].name}" for v in (u, w)}

        def corner(e: Expr) -> str:
            return self.address(e.subst({v: of(s) for v, s in starts.items()}))

        def jump(e: Expr, v: Var) -> str:
            c = e.coefficient(v)
            assert c is not None
            return self.address(c)

        for s in plan.copies:
            assert s.where is not None
            assert isinstance(s.source, Store)
            buffer, e = plan.loads[s.value]
            self.line(
                f"transpose({s.source.buffer} + {corner(s.where)}, {jump(s.where, u)}, "
                f"{buffer} + {corner(e)}, {jump(e, w)}, {counts[w]}, {counts[u]});"
            )
        if plan.copies:
            return
        rest = [p.body for p in self.fk.phases]
        for root in (r for body in rest for s in body for r in ((s.value,) if s.mask is None else (s.value, s.mask))):
            for n in root.loads():
                key = plan.loads.get(n)
                if key is None or key in plan.arrays:
                    continue
                name = plan.arrays[key] = self.fresh("transposed")
                self.line(f"alignas(64) {MEMORY[n.dtype]} {name}[{edge * edge}];")
                buffer, e = key
                self.line(f"transpose({name}, {edge}, {buffer} + {corner(e)}, {jump(e, w)}, {counts[w]}, {counts[u]});")
        for s in plan.stores:
            name = plan.outs[id(s)] = self.fresh("transposed")
            self.line(f"alignas(64) {MEMORY[self.stored_dtype(s)]} {name}[{edge * edge}];")
        head = f"for (int64_t {u.name} = {starts[u].name}; {u.name} < {ends[u]}; ++{u.name})"
        with self.block(head, u):
            # Where a row's place in the arrays begins.
            self.line(f"const int64_t row = ({u.name} - {starts[u].name}) * {edge} - {starts[w].name};")

            def point() -> None:
                for k, body in enumerate(rest):
                    with self.block("", after_writes=k > 0):
                        for s in body:
                            self.store_vector(s)

            self._row(w, starts[w].name, ends[w], edge, point)
        for s in plan.stores:
            assert s.where is not None
            assert isinstance(s.source, Store)
            self.line(
                f"transpose({s.source.buffer} + {corner(s.where)}, {jump(s.where, w)}, "
                f"{plan.outs[id(s)]}, {edge}, {counts[u]}, {counts[w]});"
            )

    def _end(self, v: Var, start: str, edge: int) -> str:
        if _whole(v, edge):
            return f"{start} + {edge}"
        end, size = self.fresh("end"), self.size(v.extent)
        self.line(f"const int64_t {end} = {start} + {edge} < {size} ? {start} + {edge} : {size};")
        return end

    def _row(self, w: Var, start: str, end: str, edge: int, point: Callable[[], None]) -> None:
        """The vectors of one row of a tile, and a last partial one if the extent of the loop asks for it."""
        if isinstance(w.extent, int) and w.extent % self.lanes == 0:
            self.lane_var, self.count = w, None
            with self.block(f"for (int64_t {w.name} = {start}; {w.name} < {end}; {w.name} += VL)", w):
                point()
            self.lane_var = None
        else:
            self.vector_loop(w, start, end, point)

    # -- accesses through arrays ---------------------------------------------------------------------------------------
    def _load(self, node: Node, vector: bool) -> str:
        plan = self.transpose_tiles
        if plan is None or not vector or node not in plan.loads:
            return super()._load(node, vector)
        n = f", {self.count}" if self.count is not None else ""
        return f"loadu({plan.arrays[plan.loads[node]]} + row + {self.lane_text()}{n})"

    def store_vector(self, s: FlatStatement) -> None:
        plan = self.transpose_tiles
        name = plan.outs.get(id(s)) if plan is not None else None
        if name is None:
            super().store_vector(s)
            return
        text, is_vector = self.value(s.value)
        if not is_vector:
            text = f"splat<{COMPUTE[s.value.dtype]}>({text})"
        n = f", {self.count}" if self.count is not None else ""
        self.line(f"storeu({name} + row + {self.lane_text()}, {text}{n});")


def ceil_div(v: Var, edge: int) -> int | Expr:
    return -(-v.extent // edge) if isinstance(v.extent, int) else v.extent


def _whole(v: Var, edge: int) -> bool:
    return isinstance(v.extent, int) and v.extent % edge == 0


def is_transposed(e: Expr, u: Var, w: Var, size: int, line: int) -> bool:
    """Whether neighbours along `u` share a cache line of `line` bytes, and neighbours along `w` do not lie side by side."""
    cu, cw = e.coefficient(u), e.coefficient(w)
    if cu is None or cw is None or not cu.is_const or not 0 < int(cu) * size <= line // 2:
        return False
    if cw.is_const:
        return abs(int(cw)) > int(cu)
    return not any(a is u or a is w for a in cw.atoms())
