"""The Triton kernels of a plan with their launches; kernels of equal text are written once."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.nodes import Size
from ..schedule.memory import home
from ..schedule.plan import Plan
from .triton import render_kernel
from .triton_launch import LOADED, Launch, launch
from .triton_square import EDGE
from .unit import anonymous

MEMBERS = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "int8": "i8", "int16": "i16", "int32": "i32",
    "int64": "i64", "uint8": "u8", "bool": "i8",
}  # fmt: skip
TILE = 4096  # elements that one program holds at a time
POINTS = 1024  # of short rows that one program has together
LINE = 128  # bytes that the memory sends at once
CACHED = 220 << 10  # bytes of a row, of which one for each processor stays in the cache


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
    """Kernels by the name of the first that has their text; for each kernel of the plan that name, and the number of programs of a launch."""

    kernels: dict[str, TritonKernel]
    symbols: dict[str, str]
    programs: dict[str, Size]

    @property
    def source(self) -> str:
        return "\n\n".join(k.source for k in self.kernels.values())


def render_triton(plan: Plan) -> TritonUnit:
    """Raises `UnsupportedError` for what Triton cannot say."""
    kernels: dict[str, TritonKernel] = {}
    symbols: dict[str, str] = {}
    programs: dict[str, Size] = {}
    known: dict[object, str] = {}
    for k in plan.kernels():
        buffers = (*k.reads, *k.writes)
        source = render_kernel(k, plan.layouts, homes={b: home(plan, b) for b in buffers})
        pointers = tuple(MEMBERS[plan.layouts[n].dtype] for n in buffers)
        same = (anonymous(source, k.name, (*buffers, *(b.name for b in k.scratch)), comment="#"), pointers)
        symbols[k.name] = known.setdefault(same, k.name)
        shape = launch(k, plan.layouts)
        if symbols[k.name] == k.name:
            kernels[k.name] = TritonKernel(k.name, source, pointers, len(k.symbols), *blocks(shape))
        x = kernels[symbols[k.name]].xblock
        programs[k.name] = shape.outer if x == 1 else (shape.outer + (x - 1)) // x
    return TritonUnit(kernels, symbols, programs)


def blocks(shape: Launch) -> tuple[int, int, int]:
    """XBLOCK, RBLOCK and the number of warps: what was fastest on an H200 (`benchmarks/tune.py`)."""
    inner = shape.inner if isinstance(shape.inner, int) else 1 << 30
    outer = shape.outer if isinstance(shape.outer, int) else 1 << 30
    if inner == 1:
        # What is not contiguous is met in as many requests as a thread has elements: few then.
        each = 2 if shape.strided else 2 * LOADED // shape.bytes
        x = min(max(512, 128 * each), _power(outer))
        return x, 1, max(1, min(8 if shape.strided else 4, x // (32 * each)))
    if shape.square:
        x, r = min(EDGE, _power(outer)), _power(inner)
        return x, r, max(1, x * r // 512)
    if shape.across and not shape.persistent:
        # Whole lines of memory: as many neighbours as a line has, as many steps along the inner loops as a tile holds.
        x = min(LINE // min(shape.bytes, 4), _power(outer))
        r = min(_power(inner), max(1, TILE // 4 // x))
        return x, r, max(1, x * r // 256)
    if shape.across:
        x, r = min(64, _power(outer)), _power(inner)
        x = max(1, min(x, 4 * TILE // r))
        return x, r, max(1, min(16, x * r // 512))
    if shape.persistent:
        r = _power(inner)
        x = min(max(1, POINTS // r), _power(outer))
        return x, r, max(1, min(16 if r <= 2 * TILE else 32, x * r // 512))
    if shape.passes < 2:
        r = min(_power(inner), TILE // 2)
        return 1, r, max(1, min(16, r // 128))
    # Rows that are read again find themselves in the cache, where few programs share a processor.
    r = min(_power(inner), 2 * TILE if inner * shape.bytes <= CACHED else TILE)
    return 1, r, max(1, min(32, r // 128))


def _power(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(n - 1, 0).bit_length()
