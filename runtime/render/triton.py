"""Kernels as Triton source.

The outer loops are one block of points `xindex`; the inner loops of a phase are one index `rindex`, either a single tile (persistent: values
stay in registers from phase to phase) or a loop over tiles with an accumulator for each reduction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from ...generated.scalars import SCANS
from ...generated.triton_scalars import TRITON_COMBINE
from ...generated.tuning import Tuning
from ..ir.index import Val, Var, expr, product
from ..ir.nodes import Buffer, Node, Size, load
from ..ir.quote import comment_text
from ..kernels.plan import Accumulate, Kernel, Phase, Reduce, Scan, Statement, Store
from ..kernels.steps import flat_index
from ..machine import tuning_of
from ..tile.apart import read_elsewhere
from ..tile.approximate import approximate
from ..tile.blocks import most_points
from ..tile.horizontal import Members
from ..tile.idle import as_rendered, idle_where
from ..tile.index_sets import IndexSets, split_index_set
from ..tile.launch import launch, needs_int64_index
from ..tile.legal import atomic
from ..tile.passes import Online
from ..tile.resident import UNROLLED, eviction_policies, resident_rows
from ..tile.scratch import over_groups, roots
from .triton_attention import render_matrices
from .triton_cooperative import ARGUMENTS, Cooperative
from .triton_gather import accumulators, round_of, rounds
from .triton_horizontal import arguments, blocks_of, constants, selection
from .triton_idle import strided_blocks
from .triton_passes import update_online
from .triton_reductions import Reductions
from .triton_values import (
    BARRIER,
    IMPORTS,
    TYPES,
    Scope,
    Values,
    held,
    identity_of,
    is_position,
    paren,
    settle,
    slow_digits,
    steps,
    steps_there,
)

NO_ALLOCATION_ROOTS: Mapping[str, str] = MappingProxyType({})
PROGRAM = "tl.program_id(0)"


def render_kernel(
    kernel: Kernel,
    layouts: dict[str, Buffer],
    name: str | None = None,
    allocation_roots: Mapping[str, str] = NO_ALLOCATION_ROOTS,
    members: Members | None = None,
    tuning: Tuning | None = None,
    program: str = PROGRAM,
) -> str:
    """A Triton module with one function: pointers to what is read, to what is written, sizes, XBLOCK and RBLOCK.

    allocation_roots  for buffers that are in the memory of another (updates in place), which one.
    members           one function for kernels that differ only in buffers and numbers of points (`triton_horizontal`): their pointers, one kernel's
                      after another's, then these numbers; or a pointer table, and how many there are.
    tuning            the table that its blocks come from.
    program           which block of points it computes.

    Booleans are behind pointers to 8-bit integers. Kernels that Triton cannot express were refused before (`tile/legal.py`).
    """
    shape = launch(kernel, layouts)
    if shape.product:
        functions = render_matrices(kernel, layouts, name or kernel.name, needs_int64_index(kernel, layouts, shape))
        return "\n".join([*IMPORTS, *functions]) + "\n"
    return _Renderer(
        kernel, layouts, name or kernel.name, allocation_roots, members, tuning or tuning_of(), program
    ).render()


class _Renderer:
    def __init__(
        self,
        kernel: Kernel,
        layouts: Mapping[str, Buffer],
        name: str,
        allocation_roots: Mapping[str, str],
        members: Members | None,
        tuning: Tuning,
        program: str,
    ) -> None:
        self.launch, self.members, self.tuning = launch(kernel, layouts), members, tuning
        kernel, layouts = as_rendered(kernel, layouts, self.launch)
        self.kernel = kernel
        self.layouts, self.name = layouts, name
        self.idle = None if members or program != PROGRAM else idle_where(kernel, layouts, allocation_roots)
        self.asked: list[str] = []  # lines that ask whether such a kernel has something to do
        read = {allocation_roots.get(b, b) for b in kernel.reads}
        self.in_place = {b for b in kernel.writes if allocation_roots.get(b, b) in read}
        self.two_dim = any(product(v.extent for v in p.inner) != 1 for p in kernel.phases)
        self.lines: list[str] = []
        self.int64_index = needs_int64_index(kernel, layouts, self.launch)
        self.reductions = Reductions(self.launch, self.int64_index)
        self.cooperative = Cooperative(kernel, self.launch) if kernel.splits > 1 else None
        program = self.cooperative.row if self.cooperative else program
        self.program = f"{program}.to(tl.int64)" if self.int64_index else program
        top = Scope(self.lines)
        self.v = Values(layouts, top, top, self.two_dim, self.int64_index)
        self.v.each = max(4, kernel.gpu.limits.vector // self.launch.bytes)
        points = kernel.outer[: len(kernel.outer) - len(kernel.grid_loop)]
        self.v.across = tuple(v for v in points if v.extent != 1)
        self.v.along = () if self.two_dim else self.v.across
        self.points = self._digits(points, "xindex")
        self.grid_points = self._digits(kernel.grid_loop, "grid_index") if kernel.grid_loop else []
        self.before: list[str] = []  # the grid loop
        self.after: list[str] = []
        self.scratch = {b.name: b for b in kernel.scratch}
        self.mapped = over_groups(kernel)
        self.v.approximate = approximate(st for _, _, body in self.mapped for st in body)
        self.read_elsewhere = read_elsewhere([st for _, _, body in self.mapped for st in body])
        self.resident = resident_rows(kernel, self.mapped, layouts, self.launch, self.tuning)
        self.stored: set[Node] = set()  # at the loops of a group: values that are known since they were stored
        self.stores = Counter(st.buffer for p in kernel.phases for st in p.body if not isinstance(st, Reduce))
        self.scopes: dict[int, Scope] = {}  # of a persistent kernel: the values over the loops of each group

    # -- the function --------------------------------------------------------------------------------------------------
    def render(self) -> str:
        block = most_points(self.launch.bytes, self.tuning)
        if self.members is None and self.idle is None and (sets := split_index_set(self.kernel, block)) is not None:
            self.by_index_sets(sets, block)
            return self._module()
        if self.idle is not None:
            there = self.v.node(self.idle)
            self.asked = [*self.lines, f"if tl.max(({there}).to(tl.int32), 0) == 0:"]
            self.lines.clear()
        written: set[str] = set()
        for phase, mapped in zip(self.kernel.phases, self.mapped, strict=True):
            if not phase.body:
                continue
            touched = {ld.attr.buffer for st in phase.body for root in roots(st) for ld in root.loads()}
            touched |= {st.buffer for st in phase.body if isinstance(st, Store) and st.mode != "set"}
            if touched & written and not self._held(mapped[2], written):
                assert not self.cooperative, "a program would read what another one stores"
                self.lines.append(BARRIER)
                self._forget()
            self.phase(phase, *mapped)
            written |= {st.buffer for st in phase.body if not isinstance(st, Reduce) and st.buffer not in self.scratch}
        if self.cooperative:
            self.lines.append(self.cooperative.reset_barrier())
        return self._module()

    def by_index_sets(self, sets: IndexSets, block: int) -> None:
        """One branch for each range of a loop."""
        lines = self.lines
        lines.append(f"tl.static_assert({block} % XBLOCK == 0)")
        step = "" if sets.step == 1 else f" // {sets.step}"
        lines.append(f"first = {self.program} * XBLOCK{step} % {sets.extent}")
        for k, (end, body) in enumerate(sets.ranges):
            self.lines = []
            self.v.outer_scope = self.v.inner_scope = Scope(self.lines)
            self.v.approximate = approximate(body)
            self._values_first(body)
            for st in body:
                self.outer_statement(st)
            last = k == len(sets.ranges) - 1
            lines.append("else:" if last else f"{'elif' if k else 'if'} first < {end}:")
            lines += [f"    {line}" for line in self.lines]
        self.lines = lines

    def _held(self, body: tuple[Statement, ...], written: set[str]) -> bool:
        """Whether a phase reads of what earlier ones have written only values that the reading threads have in registers."""
        if not self.launch.persistent or any(isinstance(st, Store) and st.mode != "set" for st in body):
            return False
        loads = {ld for st in body for root in roots(st) for ld in root.loads() if ld.attr.buffer in written}
        return loads <= self.stored and all(self.stores[ld.attr.buffer] == 1 for ld in loads)

    def _forget(self) -> None:
        """Values read before a store may be stale after it."""
        self.stored.clear()
        for scope in (self.v.outer_scope, *self.scopes.values()):
            scope.names.clear()

    def _module(self) -> str:
        buffers = (*self.kernel.reads, *self.kernel.writes)
        taken = arguments(len(buffers), self.members) if self.members else [*buffers, *self.kernel.symbols]
        taken += ARGUMENTS if self.cooperative else ()
        head = [
            *IMPORTS,
            "@triton.jit",
            f"def {self.name}({', '.join([*taken, *constants(self.members)])}):",
        ]
        if self.kernel.origins:
            head.append(f"    # {comment_text(', '.join(self.kernel.origins))}")
        column = "[:, None]" if self.two_dim else ""
        named = self.v.constants_in([*self.asked, *self.before, *self.lines, *self.after])
        if self.members:
            types = ["tl.int8" if (t := self.layouts[b].dtype) == "bool" else TYPES[t] for b in buffers]
            body = [*selection(buffers, types, self.members), *named, *self.before]
            body += blocks_of([*self.points, *self.lines], self.members, self.int64_index)
            return "\n".join(head + [f"    {line}" for line in body]) + "\n"
        points = self.v.expr(expr(self.cooperative.rows if self.cooperative else self.launch.outer))
        if self.asked:
            loop = strided_blocks([*self.points, *self.lines], points, self.program, column)
            return "\n".join(head + [f"    {line}" for line in [*named, *self.asked, *loop]]) + "\n"
        body = [f"xindex = {self.program} * XBLOCK + tl.arange(0, XBLOCK){column}", f"xmask = xindex < {points}"]
        body += self.points + named + self.before
        if self.kernel.grid_loop:
            body.append(
                f"for grid_step in range(0, {self.v.expr(expr(product(v.extent for v in self.kernel.grid_loop)))}):"
            )
            inside = ["grid_index = xindex * 0 + grid_step", *self.grid_points, *self.lines]
            body += [*(f"    {line}" for line in inside), *self.after]
        else:
            body += self.lines
        return "\n".join(head + [f"    {line}" for line in body]) + "\n"

    def _digits(self, loops: tuple[Var, ...], index: str) -> list[str]:
        """Each loop variable as a digit of a flat index."""
        lines: list[str] = []
        step: Size = 1
        live = [v for v in loops if v.extent != 1]
        for v in reversed(live):
            text = index if step == 1 else f"{index} // {paren(self.v.expr(expr(step)))}"
            if v is not live[0]:
                text = f"{text if step == 1 else f'({text})'} % {paren(self.v.expr(expr(v.extent)))}"
            lines.append(f"{v.name} = {text}")
            self.v.loop_names[v] = v.name
            step = product((step, v.extent))
        return lines

    # -- phases --------------------------------------------------------------------------------------------------------
    def phase(self, phase: Phase, group: int, loops: tuple[Var, ...], body: tuple[Statement, ...]) -> None:
        whole = Var(f"rindex{group}", product(v.extent for v in loops))
        self.v.inner = frozenset((*loops, whole))
        self.v.loops, self.v.loop_names[whole] = (*loops, whole), whole.name
        self.v.inner_mask = f"rmask{group}"
        if self.two_dim:
            self.v.along = loops
        if not loops:
            self.v.inner_scope = self.v.outer_scope
            self._values_first(body)
            for st in body:
                self.outer_statement(st)
            return
        count = self.v.expr(expr(product(v.extent for v in loops)))
        if not self.launch.persistent:
            self.looped(phase, body, group, loops, count)
            self.v.eviction, self.v.slow, self.v.resident = {}, {}, {}
            return
        if group not in self.scopes:
            self.scopes[group] = Scope(self.lines)
            lines = self.before if self.kernel.grid_loop else self.lines
            if self.cooperative:
                lines += self.cooperative.split_index(group, count, self.int64_index)
            else:
                lines += [
                    f"rindex{group} = {steps(self.int64_index)}",
                    f"rmask{group} = {steps_there(group, count, True)}",
                ]
            lines += self._digits(loops, f"rindex{group}")
        self.v.inner_scope = self.scopes[group]
        self._values_first(body)
        for st in body:
            self.inner_statement(st, group, loops)
        if self.cooperative and (reduced := [st for st in body if isinstance(st, Reduce)]):
            named = [(st.name, identity_of(st.kind, st.dtype), st.dtype) for st in reduced]
            for st, partials in zip(reduced, self.cooperative.gather_partials(self.lines, named), strict=True):
                self.lines.append(f"{st.name} = {self.reductions.reduced(st, partials, '', 0)}")

    def _values_first(self, body: tuple[Statement, ...]) -> None:
        """Read everything before the first store, which may be in place; but not what this phase itself stores."""
        stored = {st.buffer for st in body if not isinstance(st, Reduce)}
        loaded = [root for st in body for root in roots(st)]
        if not any(ld.attr.buffer in stored for root in loaded for ld in root.loads()):
            for root in loaded:
                self.v.node(root)

    def outer_statement(self, st: Statement) -> None:
        if isinstance(st, Reduce):
            value = self.v.constant(0, "int64") if is_position(st) else self.v.node(st.value)
            if is_position(st) or self.v.depends(st.value) == (False, False):
                # A register has a value for each point, as the masks of who reads at it expect.
                name = self.v.fresh()
                self.lines.append(f"{name} = tl.broadcast_to({value}, {'[XBLOCK, 1]' if self.two_dim else '[XBLOCK]'})")
                value = name
            self.v.local[st.name] = value
        else:
            self.store(st, self.v.node(st.value), False)

    def inner_statement(self, st: Statement, group: int, loops: tuple[Var, ...]) -> None:
        value = self.v.node(st.value)
        if isinstance(st, Reduce):
            self.v.local[st.name] = st.name
            name = self.cooperative.partial(st.name) if self.cooperative else st.name
            block = self.reductions.masked(st, value, group)
            self.lines.append(f"{name} = {self.reductions.reduced(st, block, f'rindex{group}')}")
        elif isinstance(st, Scan):
            one = self._scanned(st, value, loops, group)
            self.store(st, one, True)
        elif isinstance(st, Accumulate):
            self.accumulate(st, value, group)
        else:
            self.store(st, value, True)

    def accumulate(self, st: Accumulate, value: str, group: int) -> None:
        """An accumulator for the whole row: set before the grid loop, stored after it."""
        acc, dtype = f"{st.buffer}_acc", st.value.dtype
        self.before.append(f"{acc} = tl.full([XBLOCK, RBLOCK], {identity_of(st.kind, dtype)}, {held(dtype)})")
        combined = f"{TRITON_COMBINE[st.kind]}({acc}, {value})"
        self.lines.append(f"{acc} = tl.where(xmask & rmask{group}, {combined}, {acc})")
        scope, self.v.inner_scope = self.v.inner_scope, Scope(self.after)
        self.store(st, acc, True)
        self.v.inner_scope = scope

    def looped(self, phase: Phase, body: tuple[Statement, ...], group: int, loops: tuple[Var, ...], count: str) -> None:
        """A loop over tiles: accumulators before, statements inside, final reductions after."""
        before: list[str] = []
        inside = [f"rindex{group} = {steps(self.int64_index, 'roffset')}"]
        gathers = self.launch.gathers
        goes = round_of(self.kernel.gpu) if gathers else "RBLOCK"
        inside.append(f"rmask{group} = {steps_there(group, count, False, goes)}")
        after: list[str] = []
        totals: list[str] = []
        late: list[str] = []
        inside += self._digits(loops, f"rindex{group}")
        self.v.inner_scope = Scope(inside)
        self.v.slow = slow_digits(loops)
        at = self.kernel.phases.index(phase)
        self.v.eviction, self.v.resident = eviction_policies(self.kernel, at), self.resident[at]
        ends: list[tuple[Reduce, str]] = []
        self._values_first(body)
        for st in body:
            value = self.v.node(st.value)
            if isinstance(st, Online):
                first, each, last = update_online(st, value, f"xmask & rmask{group}", held(st.dtype), count)
                before += first
                inside += each
                totals += last
                self.v.local[st.name] = st.name
            elif isinstance(st, Reduce):
                before += self.reductions.start(st)
                late += self.reductions.combine(st, value, group)
                ends.append((st, " + ".join(accumulators(self.launch, st))))
            elif isinstance(st, Scan):
                one = self._scanned_in_loop(st, value, loops, group, before)
                self.store(st, one, True)
            else:
                self.store(st, value, True)
        inside += late
        for st, acc in ends:
            after.append(f"{st.name} = {self.reductions.reduced(st, acc, f'{st.name}_pos')}")
            self.v.local[st.name] = st.name
        self.lines += before
        self.lines += [f"{row.tiles} = ()" for row in self.v.resident.values() if row.first]
        count = self.v.bound(count)
        tiles = f"range(0, {count}, RBLOCK)"
        if self.launch.passes < 2 and not self.launch.outer_reduction and all(isinstance(st, Reduce) for st in body):
            # The second tile is loaded while the first is worked on.
            tiles = f"tl.range(0, {count}, RBLOCK, loop_unroll_factor=2)"
        if self.v.resident:
            tiles = f"{UNROLLED}(0, {count}, RBLOCK)"
        loop = [f"for roffset in {tiles}:", *(f"    {line}" for line in inside)]
        self.lines += rounds(self.kernel.gpu, count, inside) if gathers else loop
        self.lines += after + totals

    # -- scans ---------------------------------------------------------------------------------------------------------
    def _scanned(self, st: Scan, value: str, loops: tuple[Var, ...], group: int) -> str:
        name = self.v.fresh()
        self.lines.append(f"{name} = {self.reductions.scanned(st, value, loops, group)}")
        return name

    def _scanned_in_loop(self, st: Scan, value: str, loops: tuple[Var, ...], group: int, before: list[str]) -> str:
        """The scan of a tile, continued from the tiles before it."""
        name, carry = self.v.fresh(), self.v.fresh()
        own = held(st.value.dtype)
        # The running total of a long sum loses digits in float32: what is carried from tile to tile has the declared accumulation dtype.
        accumulation = SCANS[st.kind].triton
        wider = accumulation is not None and own == "tl.float32"
        total = TYPES[accumulation.dtype("float32")] if accumulation is not None and wider else own
        before.append(f"{carry} = tl.full([XBLOCK, 1], {identity_of(st.kind, st.value.dtype, True)}, {total})")
        combine, lines = TRITON_COMBINE[st.kind], self.v.inner_scope.lines
        scan = self.reductions.scanned(st, value, loops, group)
        lines.append(f"{name} = {combine}(tl.broadcast_to({carry}, [XBLOCK, RBLOCK]), {scan}.to({total})).to({own})")
        last = f"tl.reduce({self.reductions.masked(st, value, group)}, 1, {combine})[:, None].to({total})"
        lines.append(f"{carry} = {combine}({carry}, {last}).to({total})")
        return name

    # -- stores --------------------------------------------------------------------------------------------------------
    def store(self, st: Store | Scan, value: str, inner: bool) -> None:
        if st.buffer in self.scratch:
            # A scratch tile stays in registers: its loads are this value.
            tile = self.v.fresh()
            self.lines.append(f"{tile} = tl.broadcast_to({value}, [XBLOCK, {'RBLOCK' if inner else '1'}])")
            self.v.local[st.buffer] = tile
            if inner:
                self.v.inner_tiles.add(st.buffer)
            return
        for e in st.index:
            for a in sorted(e.atoms(), key=lambda a: a.text):
                if isinstance(a, Val):
                    self.v.node(a.node)
        where = self.v.expr(self.v.by_common_index(flat_index(st.index, self.layouts[st.buffer])))
        mask = f"xmask & {self.v.inner_mask}" if inner else "xmask"
        if self.cooperative and not inner:
            mask += self.cooperative.store_once
        if isinstance(st, Store) and st.mask is not None:
            mask = f"{mask} & {self.v.node(st.mask)}"
        dtype = self.layouts[st.buffer].dtype
        mode = st.mode if isinstance(st, Store) else "set"
        # Pointer and value must be blocks of one shape.
        shape = "[XBLOCK, RBLOCK]" if inner else "[XBLOCK, 1]" if self.two_dim else "[XBLOCK]"
        typed = f"({value}).to({'tl.int8' if dtype == 'bool' else TYPES[dtype]})"
        if self.two_dim and not inner and self.read_elsewhere(st):
            typed = f"tp.apart({typed})"
        arguments = (
            f"{st.buffer} + tl.broadcast_to(xindex * 0 + {where}, {shape}), tl.broadcast_to({typed}, {shape}), {mask}"
        )
        lines = self.v.inner_scope.lines if inner else self.lines
        if mode == "set":
            if st.buffer in self.in_place and self.two_dim:
                settle(lines)
            # Rows that are read again should stay in the cache longer than stored values.
            hint = ', eviction_policy="evict_first"' if inner and "evict_first" in self.v.eviction.values() else ""
            lines.append(f"tl.store({arguments}{hint})")
            if isinstance(st, Store) and st.mask is None:
                # What reads it back in this phase takes the value: another thread's store may not have arrived.
                scope = self.v.inner_scope if inner else self.v.outer_scope
                stored = load(st.buffer, st.index, dtype)
                scope.names[stored] = value
                self.stored.add(stored)
        else:
            operation = atomic(mode, dtype)
            assert operation, (mode, dtype)
            lines.append(f'tl.atomic_{operation}({arguments}, sem="relaxed")')
