"""The Triton kernels of a plan with their launches; kernels of equal text are written once."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.nodes import Size
from ..schedule.plan import Kernel, Plan
from .triton import Launch, launch, render_kernel
from .unit import anonymous

MEMBERS = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "int8": "i8", "int16": "i16", "int32": "i32",
    "int64": "i64", "uint8": "u8", "bool": "i8",
}  # fmt: skip
TILE = 4096  # elements that one program holds at a time
POINTS = 1024  # of a kernel without inner loops: eight for each thread of four warps


@dataclass(frozen=True)
class TritonKernel:
    """One kernel: a module's source, the types behind its pointers, and how it is compiled and launched.

    programs  number of programs that cover the outer loops.
    sizes     64-bit integers after the pointers.
    """

    name: str
    source: str
    pointers: tuple[str, ...]
    sizes: int
    programs: Size
    xblock: int
    rblock: int
    warps: int


@dataclass(frozen=True)
class TritonUnit:
    """Kernels by the name of the first that has their text, and for each kernel of the plan that name."""

    kernels: dict[str, TritonKernel]
    symbols: dict[str, str]

    @property
    def source(self) -> str:
        return "\n\n".join(k.source for k in self.kernels.values())


def render_triton(plan: Plan) -> TritonUnit:
    """Raises `UnsupportedError` for what Triton cannot say."""
    kernels: dict[str, TritonKernel] = {}
    symbols: dict[str, str] = {}
    known: dict[object, str] = {}
    for k in plan.kernels():
        source = render_kernel(k, plan.layouts)
        buffers = (*k.reads, *k.writes)
        pointers = tuple(MEMBERS[plan.layouts[n].dtype] for n in buffers)
        same = (anonymous(source, k.name, (*buffers, *(b.name for b in k.scratch)), comment="#"), pointers)
        symbols[k.name] = known.setdefault(same, k.name)
        if symbols[k.name] == k.name:
            x, r, warps = blocks(launch(k))
            kernels[k.name] = TritonKernel(k.name, source, pointers, len(k.symbols), programs(k), x, r, warps)
    return TritonUnit(kernels, symbols)


def programs(kernel: Kernel) -> Size:
    """Number of programs of a launch."""
    shape = launch(kernel)
    x, _, _ = blocks(shape)
    return shape.outer if x == 1 else (shape.outer + (x - 1)) // x


def blocks(shape: Launch) -> tuple[int, int, int]:
    """XBLOCK, RBLOCK and the number of warps."""
    inner = shape.inner if isinstance(shape.inner, int) else TILE
    outer = shape.outer if isinstance(shape.outer, int) else 1 << 30
    if inner == 1:
        x = min(POINTS, _power(outer))
        return x, 1, max(1, min(4, x // 256))
    r = _power(inner) if shape.persistent else min(_power(inner), TILE // 2)
    x = min(max(1, TILE // 4 // r), _power(outer))
    return x, r, max(1, min(16, x * r // 256))


def _power(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(n - 1, 0).bit_length()
