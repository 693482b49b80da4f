"""The Triton kernels of a plan with their launches; kernels of equal text are written once, and run as one where they can."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from ..ir.nodes import Size
from ..schedule.memory import home
from ..schedule.plan import Kernel, Plan
from ..schedule.together import together
from .triton import render_kernel
from .triton_group import Group, Members, can_join, most, steps, unit_of
from .triton_launch import LOADED, Launch, launch
from .triton_product import LEAST_STEPS
from .triton_square import EDGE
from .unit import anonymous

MEMBERS = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "int8": "i8", "int16": "i16", "int32": "i32",
    "int64": "i64", "uint8": "u8", "bool": "i8",
}  # fmt: skip
TILE = 4096  # elements that one program holds at a time
MANY = 8  # elements that a point reads
POINTS = 1024  # of short rows that one program has together
LINE, SECTOR = 128, 32  # bytes that the memory sends at once, at best and at least
FEW = 256  # programs, below which processors may be idle
CACHED = 220 << 10  # bytes of rows, of which those of one program for each processor stay in the cache
LONGEST = 256 << 10  # the same where they are of one buffer
#: Of a product of matrices, by the rows of a block: its columns, the steps of its sums at a time, warps.
PRODUCTS = {16: (32, 256, 4), 32: (64, 128, 4), 64: (128, 128, 4), 128: (128, 64, 8)}


@dataclass(frozen=True)
class TritonKernel:
    """One kernel: a module's source, the types behind its pointers, and how it is compiled and launched.

    sizes  64-bit integers after the pointers.
    """

    name: str
    source: str
    pointers: tuple[str, ...]
    sizes: int
    xblock: int
    rblock: int
    warps: int


@dataclass(frozen=True)
class TritonUnit:
    """Kernels by the name of the first that has their text; for each function that a wrapper calls (a kernel of the plan, or a group of them)
    that name, and the number of programs of a launch. `grouped`: by name, those that have no call of their own.
    """

    kernels: dict[str, TritonKernel]
    symbols: dict[str, str]
    programs: dict[str, Size]
    grouped: dict[str, Group] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return "\n\n".join(k.source for k in self.kernels.values())

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The kernels of each group, whose buffers its function takes one kernel after another."""
        return {g.name: g.kernels for g in self.grouped.values()}


def render_triton(plan: Plan, *, boxed: bool = False) -> TritonUnit:
    """Raises `UnsupportedError` for what Triton cannot say. `boxed`: the call frees each argument after its last use."""
    return _Unit(plan).render(boxed)


#: Points of a block of a group with many: those of one warp, since each warp takes its time to find its member.
LONG = 1024


class _Unit:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.shapes = {k.name: launch(k, plan.layouts) for k in plan.kernels()}
        self.unit = TritonUnit({}, {}, {})
        self.known: dict[object, str] = {}

    def render(self, boxed: bool) -> TritonUnit:
        kernels = {k.name: k for k in self.plan.kernels()}
        leads = {}
        for names in together(self.plan, self.key, boxed=boxed):
            points = tuple(_number(self.shapes[n].outer) for n in names)
            group = Group(f"{names[0]}_x{len(names)}", names, points, unit_of(points[0]))
            self.unit.grouped.update(dict.fromkeys(names, group))
            leads[names[0]] = group
        for k in kernels.values():
            if k.name in leads:
                self.group(leads[k.name], k)
            elif k.name not in self.unit.grouped:
                self.lone(k)
        return self.unit

    def key(self, k: Kernel) -> tuple[Hashable, int] | None:
        """What kernels of one group have in common, and how many there may be."""
        shape = self.shapes[k.name]
        if not can_join(k, shape):
            return None
        unit = unit_of(_number(shape.outer))
        _, same = self.text(k, k.name, Members(1, unit))
        return (same, shape.bytes, unit), most(len(k.reads) + len(k.writes))

    def text(self, k: Kernel, name: str, members: Members | None) -> tuple[str, tuple[str, tuple[str, ...]]]:
        """A kernel's source, and what is equal for kernels that are the same binary."""
        buffers = (*k.reads, *k.writes)
        homes = {b: home(self.plan, b) for b in buffers}
        source = render_kernel(k, self.plan.layouts, name, homes, members)
        types = tuple(MEMBERS[self.plan.layouts[n].dtype] for n in buffers)
        return source, (anonymous(source, name, (*buffers, *(b.name for b in k.scratch)), comment="#"), types)

    def lone(self, k: Kernel) -> None:
        shape = self.shapes[k.name]
        x = self.add(k, k.name, None, blocks(shape)).xblock
        self.unit.programs[k.name] = shape.outer if x == 1 else (shape.outer + (x - 1)) // x

    def group(self, group: Group, first: Kernel) -> None:
        many = steps(group.points, LONG)
        shape = replace(self.shapes[first.name], outer=max(group.points))
        tile = (LONG, many, 1) if many > 1 else blocks(shape)
        kernel = self.add(first, group.name, Members(len(group.kernels), group.unit), tile)
        self.unit.programs[group.name] = group.programs(kernel.xblock * kernel.rblock)

    def add(self, k: Kernel, name: str, members: Members | None, tile: tuple[int, int, int]) -> TritonKernel:
        """The kernel of this text and with this XBLOCK, RBLOCK and number of warps, which may be that of another name."""
        source, same = self.text(k, name, members)
        count = members.count if members else 1
        sizes = len(k.symbols) if members is None else 2 * count
        made = TritonKernel(name, source, same[1] * count, sizes, *tile)
        symbol = self.known.setdefault((same, tile) if members else same, name)
        self.unit.symbols[name] = symbol
        return self.unit.kernels.setdefault(symbol, made)


def _number(n: Size) -> int:
    assert isinstance(n, int)
    return n


def blocks(shape: Launch) -> tuple[int, int, int]:
    """XBLOCK, RBLOCK and the number of warps: what was fastest on an H200 (`benchmarks/tune.py`)."""
    inner = shape.inner if isinstance(shape.inner, int) else 1 << 30
    outer = shape.outer if isinstance(shape.outer, int) else 1 << 30
    if shape.product:
        # Few rows: the memory decides, and many programs keep it busy. Many: a block's operands are used as often as registers allow.
        columns, steps_at_once, warps = PRODUCTS[shape.product]
        return columns, min(steps_at_once, max(LEAST_STEPS, _power(inner))), warps
    if inner == 1:
        # What is not contiguous is met in as many requests as a thread has elements: few then.
        each = 2 if shape.strided else 2 * LOADED // shape.bytes
        if shape.loads > MANY:
            each = min(each, 4)  # all of it lies in registers at a time: the elements of a window
        x = min(max(512, 64 * each), _power(outer))
        return x, 1, max(1, x // (32 * each))
    if shape.square:
        x, r = min(EDGE, _power(outer)), _power(inner)
        return x, r, max(1, x * r // 512)
    if shape.across and not shape.persistent:
        # Whole lines of memory: as many neighbours as a line has, as many steps along the inner loops as a tile holds.
        x = min(LINE // min(shape.bytes, 4), _power(outer))
        while outer < FEW * x and x * shape.bytes > SECTOR:
            x //= 2
        r = min(_power(inner), max(1, TILE // 4 // x))
        return x, r, max(1, x * r // 256)
    if shape.across:
        x, r = min(64, _power(outer)), _power(inner)
        x = max(1, min(x, 4 * TILE // r))
        # Warps must meet for each sum, in the shared memory: few, with much to add up on their own.
        return x, r, max(1, min(16, x * r // (2048 if shape.sums else 512)))
    if shape.persistent:
        r = _power(inner)
        x = min(max(1, POINTS // r), _power(outer))
        return x, r, max(1, min(16 if r <= 2 * TILE else 32, x * r // 512))
    if shape.passes < 2:
        r = min(_power(inner), TILE // 2)
        return 1, r, max(1, min(16, r // 128))
    # Rows that are read again find themselves in the cache, where few programs share a processor.
    near = shape.row <= CACHED or (shape.rows == 1 and shape.row <= LONGEST)
    r = min(_power(inner), 2 * TILE if near else TILE)
    if TILE // 2 <= shape.even < r:
        r = shape.even
    return 1, r, max(1, min(32, r // 128))


def _power(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(n - 1, 0).bit_length()
