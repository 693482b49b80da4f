"""The Triton kernels of a plan and of its routines, with their launches; kernels of equal text are written once, and run as one where they can."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from ...generated.languages import TRITON_LANGUAGE
from ...generated.tuning import Tuning
from ..fuse.horizontal import horizontal_groups
from ..ir.index import product
from ..ir.nodes import Size
from ..kernels.plan import Kernel, Plan
from ..kernels.routines import Routine, routines_of
from ..kernels.steps import allocation_root
from ..machine import MEASURED, tuning_of
from ..tile.blocks import Blocks, blocks, group_blocks
from ..tile.cooperative import reductions
from ..tile.horizontal import HorizontalGroup, Members, can_join, unit_of
from ..tile.idle import goes_in_strides
from ..tile.last import block_of, last_block_chains
from ..tile.launch import launch
from ..tile.routines import routine_blocks, rows_of
from .cpp_unit import anonymous
from .triton import PROGRAM, render_kernel
from .triton_cooperative import PARTIAL_BYTES, WORKSPACE
from .triton_horizontal import FILL, FILL_NAME, fill_source
from .triton_last import FOLLOWING, SEMAPHORE, chain_source
from .triton_routines import render_routine


@dataclass(frozen=True)
class TritonKernel:
    """One kernel: a module's source, the types behind its pointers, and how it is compiled and launched.

    sizes  64-bit integers after the pointers.
    plain  its source for addresses that are no multiples of 16, where it is another.
    """

    name: str
    source: str
    pointers: tuple[str, ...]
    sizes: int
    xblock: int
    rblock: int
    warps: int
    plain: str = ""


@dataclass(frozen=True)
class TritonUnit:
    """The kernels of a plan, and how its functions (a kernel of the plan, or a group of them) are launched.

    kernels      by the name of the first that has their text.
    symbols      for each function that a wrapper calls: the name of its kernel.
    programs     for each of them: the number of programs of a launch.
    grouped      by name, the kernels that have no call of their own.
    chained      functions whose last program runs what follows, with all their kernels. They take the address of a semaphore last.
    cooperative  kernels whose programs wait for each other, with the bytes of their workspace. They take the addresses of a semaphore and of that
                 workspace last.
    strided      kernels whose programs go through blocks until all are done, so that any number of programs is right; and how many they have at most.
    """

    kernels: dict[str, TritonKernel]
    symbols: dict[str, str]
    programs: dict[str, Size]
    grouped: dict[str, HorizontalGroup] = field(default_factory=dict)
    chained: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cooperative: dict[str, int] = field(default_factory=dict)
    strided: dict[str, int] = field(default_factory=dict)

    def programs_of(self, name: str, points: Size, block: int) -> Size:
        """The number of programs that a function of one kernel is launched with, where each takes `block` of the points at a time."""
        programs = programs_of(points, block)
        return min(programs, self.strided.get(name, programs)) if isinstance(programs, int) else programs

    @property
    def source(self) -> str:
        return "\n\n".join(k.source for k in self.kernels.values())

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The kernels of each function that runs several, whose buffers it takes one kernel after another."""
        return {g.name: g.kernels for g in self.grouped.values()} | self.chained

    @property
    def pointer_tables(self) -> frozenset[str]:
        """The groups whose function takes tensors, and fills a table with their addresses."""
        return frozenset(g.name for g in self.grouped.values() if g.pointer_table)


def render_triton(
    plan: Plan, *, boxed: bool = False, capability: int = MEASURED, tuning: Tuning | None = None, replayed: bool = False
) -> TritonUnit:
    """The kernels with the blocks that the table of a GPU (specs/tuning) gives them.

    boxed       the call frees each argument after its last use.
    capability  of the GPU, times ten.
    tuning      another table than that of the GPU.
    replayed    launches are recorded in a graph, where one more costs less than to count programs for it.
    """
    tuning = tuning or tuning_of(capability)
    return _Unit(plan, replace(tuning, last=None) if replayed else tuning).render(boxed)


class _Unit:
    def __init__(self, plan: Plan, tuning: Tuning) -> None:
        self.plan, self.tuning = plan, tuning
        self.shapes = {k.name: launch(k, plan.layouts) for k in plan.kernels()}
        self.unit = TritonUnit({}, {}, {})
        self.known: dict[object, str] = {}

    def render(self, boxed: bool) -> TritonUnit:
        kernels = {k.name: k for k in self.plan.kernels()}
        leads = {}
        for names in horizontal_groups(self.plan, self.key, boxed=boxed):
            points = tuple(_number(self.shapes[n].outer) for n in names)
            group = HorizontalGroup(
                f"{names[0]}_x{len(names)}",
                names,
                points,
                unit_of(points[0], kernels[names[0]].gpu),
                kernels[names[0]].gpu,
                _pointers(kernels[names[0]]),
            )
            self.unit.grouped.update(dict.fromkeys(names, group))
            leads[names[0]] = group
        chains: dict[str, tuple[Kernel, ...]] = {}
        if (last := self.tuning.last) is not None:
            free = {name for name in kernels if name not in self.unit.grouped}
            chains = {c[0].name: c for c in last_block_chains(self.plan, self.shapes, free, last)}
        inside = {k.name for chain in chains.values() for k in chain[1:]}
        for k in kernels.values():
            if k.name in leads:
                self.group(leads[k.name], k)
            elif k.name in chains:
                self.chain(chains[k.name])
            elif k.name not in self.unit.grouped and k.name not in inside:
                self.lone(k)
        for routine in routines_of(self.plan):
            self.routine(routine)
        return self.unit

    def key(self, k: Kernel) -> tuple[Hashable, int] | None:
        """What kernels of one group have in common, and how many there may be."""
        shape = self.shapes[k.name]
        if not can_join(k, shape):
            return None
        unit = unit_of(_number(shape.outer), k.gpu)
        _, same = self.text(k, k.name, Members(1, unit))
        return (same, shape.bytes, unit), k.gpu.costs.group.members

    def text(self, k: Kernel, name: str, members: Members | None) -> tuple[str, tuple[str, tuple[str, ...]]]:
        """A kernel's source, and what is equal for kernels that are the same binary."""
        buffers = (*k.reads, *k.writes)
        source = render_kernel(k, self.plan.layouts, name, self.allocation_roots(k), members, self.tuning)
        types = tuple(TRITON_LANGUAGE.dtypes[self.plan.layouts[n].dtype].pointer for n in buffers)
        return source, (anonymous(source, name, (*buffers, *(b.name for b in k.scratch)), comment="#"), types)

    def allocation_roots(self, k: Kernel) -> dict[str, str]:
        """For each of the kernel's buffers, the buffer in whose memory it lies."""
        return {b: allocation_root(self.plan, b) for b in (*k.reads, *k.writes)}

    def lone(self, k: Kernel) -> None:
        shape = self.shapes[k.name]
        x = self.add(k, k.name, None, blocks(shape, self.tuning)).xblock
        if goes_in_strides(k, self.plan.layouts, self.allocation_roots(k)):
            self.unit.strided[k.name] = k.gpu.costs.idle
        self.unit.programs[k.name] = self.unit.programs_of(k.name, shape.outer, x)
        if k.splits > 1:
            assert x == 1, k.name
            self.unit.cooperative[k.name] = PARTIAL_BYTES * reductions(k) * _number(shape.outer)

    def routine(self, routine: Routine) -> None:
        name, tile = routine.name, routine_blocks(routine, self.tuning.routine)
        source = render_routine(routine, self.plan.layouts, name)
        types = tuple(
            TRITON_LANGUAGE.dtypes[self.plan.layouts[b].dtype].pointer for b in (*routine.reads, *routine.writes)
        )
        symbol = self.known.setdefault((anonymous(source, name, (), comment="#"), types), name)
        self.unit.symbols[name] = symbol
        self.unit.kernels.setdefault(symbol, TritonKernel(name, source, types, len(routine.symbols), *tile))
        self.unit.programs[name] = programs_of(product(rows_of(routine)), tile[0])

    def chain(self, chain: tuple[Kernel, ...]) -> None:
        """A kernel whose last program runs those that follow it."""
        first, *others = chain
        name, shape = f"{first.name}_and_{len(others)}", self.shapes[first.name]
        tile, pieces, types = blocks(shape, self.tuning), [], []
        for k in chain:
            program = PROGRAM if k is first else FOLLOWING
            pieces.append(
                render_kernel(k, self.plan.layouts, k.name, self.allocation_roots(k), None, self.tuning, program)
            )
            types += [TRITON_LANGUAGE.dtypes[self.plan.layouts[b].dtype].pointer for b in (*k.reads, *k.writes)]
        source = chain_source(name, chain, pieces, [block_of(self.shapes[k.name]) for k in others])
        made = TritonKernel(name, source, (*types, SEMAPHORE), 0, *tile)
        known = anonymous(source, name, tuple(b for k in chain for b in (*k.reads, *k.writes)), comment="#")
        symbol = self.known.setdefault((known, made.pointers, tile), name)
        self.unit.symbols[name] = symbol
        self.unit.kernels.setdefault(symbol, made)
        self.unit.chained[name] = tuple(k.name for k in chain)
        self.unit.programs[name] = -(-_number(shape.outer) // tile[0])

    def group(self, group: HorizontalGroup, first: Kernel) -> None:
        shape = replace(self.shapes[first.name], outer=max(group.points))
        kernel = self.add(
            first, group.name, group.members, group_blocks(group.points, group.pointer_table, shape, self.tuning)
        )
        self.unit.programs[group.name] = group.programs(kernel.xblock * kernel.rblock)
        if group.pointer_table and FILL_NAME not in self.unit.kernels:
            self.unit.kernels[FILL_NAME] = TritonKernel(FILL_NAME, fill_source(), ("i64",), FILL, 1, 1, 1)
            self.unit.symbols[FILL_NAME] = FILL_NAME

    def add(self, k: Kernel, name: str, members: Members | None, tile: Blocks) -> TritonKernel:
        """The kernel of this text and with this XBLOCK, RBLOCK and number of warps, which may be that of another name."""
        source, same = self.text(k, name, members)
        pointers, sizes = (*same[1], *((SEMAPHORE, WORKSPACE) if k.splits > 1 else ())), len(k.symbols)
        if members is not None:
            pointers, sizes = (("i64",), 1) if members.pointer_table else (pointers * members.count, 2 * members.count)
        plain = ""
        if k.tile is not None and k.tile.descriptors:
            plain = self.text(replace(k, tile=replace(k.tile, descriptors=False)), name, members)[0]
        made = TritonKernel(name, source, pointers, sizes, *tile, plain)
        symbol = self.known.setdefault((same, tile) if members else same, name)
        self.unit.symbols[name] = symbol
        return self.unit.kernels.setdefault(symbol, made)


def programs_of(points: Size, block: int) -> Size:
    """How many programs `points` take, if each has `block` of them."""
    return points if block == 1 else (points + (block - 1)) // block


def _pointers(k: Kernel) -> int:
    return len(k.reads) + len(k.writes)


def _number(n: Size) -> int:
    assert isinstance(n, int)
    return n


__all__ = ["TritonKernel", "TritonUnit", "blocks", "programs_of", "render_triton"]
