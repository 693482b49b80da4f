"""Operands of a product of matrices in a plan: where their elements are read, in memory or where the kernel that makes them reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..ir.facts import equal, flat, in_range
from ..ir.index import Atom, Expr, Val, Var, expr
from ..ir.nodes import Buffer, Extern, Node, Ref, contiguous_strides, load, rebuild
from .plan import ExternStep, Kernel, KernelStep, Step, Store, ViewOf
from .statements import kernel_checks
from .steps import step_reads, step_writes

HALF = ("float16", "bfloat16")

Factors = Callable[[Extern], tuple[int, ...] | None]
"""Of a call that is a product of two matrices, or of batches of them: which arguments they are, and which one is added to it, if any."""
Layouts = Mapping[str, Buffer]


def is_plain(kernel: Kernel) -> bool:
    """Whether a kernel has independent points, loops of known extents, and nothing that may raise."""
    return not (
        kernel.serial or kernel.scratch or kernel.grid_loop or kernel.symbols or kernel.parts
    ) and not kernel_checks(kernel)


def touched(step: Step) -> tuple[str, ...]:
    """What a step reads and writes."""
    return (*step_reads(step), *step_writes(step))


def is_known(b: Buffer) -> bool:
    """Whether sizes, strides and offset are numbers, and there are elements."""
    return all(isinstance(n, int) for n in (*b.shape, *(b.stride or ()), b.offset)) and 0 not in b.shape


def has_values(e: Expr) -> bool:
    """Whether an index is data."""
    return any(isinstance(a, Val) for a in e.atoms())


def buffer_of(given: object) -> str:
    """The buffer that an argument of an extern is, or is a view of; "" for what is none."""
    return given.buffer if isinstance(given, (Ref, ViewOf)) else ""


def view_of(given: object, layouts: Layouts) -> ViewOf:
    """An argument of an extern as a strided view."""
    if isinstance(given, ViewOf):
        return given
    assert isinstance(given, Ref)
    b = layouts[given.buffer]
    return ViewOf(b.name, b.shape, b.stride or contiguous_strides(b.shape), b.offset)


def strides_of(b: Buffer) -> tuple[tuple[int | Expr, ...], int | Expr]:
    """Strides and offset in elements."""
    return b.stride or contiguous_strides(b.shape), b.offset


def element_at(view: ViewOf, index: Sequence[Expr]) -> Expr:
    """The position in memory of an element of a view."""
    return flat(tuple(index), view.stride, view.offset)


def operand(
    view: ViewOf,
    index: tuple[Expr, ...],
    prologues: Mapping[str, Kernel],
    layouts: Layouts,
    views: list[tuple[Buffer, str]],
) -> Node | None:
    """An element of an operand: read where it lies, or where its prologue reads it."""
    base = layouts[view.buffer]
    if not all(isinstance(n, int) for n in (*view.shape, *view.stride, view.offset)):
        return None
    if (prologue := prologues.get(view.buffer)) is not None:
        at = coordinates(element_at(view, index), base)
        (store,) = prologue.phases[0].body
        mapping = None if at is None or not isinstance(store, Store) else loops_at(store.index, at)
        if mapping is None or not store.value.vars() <= mapping.keys():
            return None
        return rebuild(store.value, lambda _: None, mapping)
    name = f"operand{len(views)}"
    if name in layouts:
        return None
    views.append((Buffer(name, view.shape, base.dtype, view.stride, view.offset), view.buffer))
    return load(name, index, base.dtype)


def loops_at(index: Sequence[Expr], at: Sequence[Expr]) -> dict[Atom, int | Expr] | None:
    """The loop variables of an index at an element: each is a digit of one of its coordinates."""
    mapping: dict[Atom, int | Expr] = {}
    for place, e in zip(index, at, strict=True):
        steps = {v: int(c) for v in place.atoms() if isinstance(v, Var) and (c := place.coefficient(v)) and c.is_const}
        rest = e
        for v in sorted(steps, key=lambda v: (-steps[v], v.text)):
            if v in mapping or steps[v] < 1:
                return None
            mapping[v], rest = rest // steps[v], rest % steps[v]
    same = all(equal(place.subst(mapping), e) for place, e in zip(index, at, strict=True))
    return (
        mapping if same and all(in_range(expr(e), v.extent) for v, e in mapping.items() if isinstance(v, Var)) else None
    )


def coordinates(position: Expr, b: Buffer) -> tuple[Expr, ...] | None:
    """Coordinates of the element at a position in the memory of a buffer."""
    stride, offset = strides_of(b)
    rest, found = position - offset, [expr(0)] * len(b.shape)
    steps = {k: s for k, s in enumerate(stride) if b.shape[k] != 1 and isinstance(s, int)}
    for k in sorted(steps, key=lambda k: -steps[k]):
        if steps[k] == 0:
            return None
        found[k], rest = rest // steps[k], rest % steps[k]
    inside = all(in_range(e, n) for e, n in zip(found, b.shape, strict=True))
    return tuple(found) if inside and equal(flat(tuple(found), stride, offset), position) else None


def readers_and_writers(steps: Sequence[Step]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """The positions of the steps that read each buffer, and of those that write it."""
    readers: dict[str, list[int]] = {}
    writers: dict[str, list[int]] = {}
    for k, step in enumerate(steps):
        for name in step_reads(step):
            readers.setdefault(name, []).append(k)
        for name in step_writes(step):
            writers.setdefault(name, []).append(k)
    return readers, writers


def as_one(name: str, parts: Sequence[KernelStep | ExternStep]) -> Kernel:
    """A kernel that runs steps as one, one of them a kernel; its results are those of the last."""
    kernels = [s.kernel for s in parts if isinstance(s, KernelStep)]
    written = {n for s in parts for n in step_writes(s)}
    reads = dict.fromkeys(n for s in parts for n in step_reads(s) if n not in written)
    origins = dict.fromkeys(
        o for s in parts for o in (s.kernel.origins if isinstance(s, KernelStep) else (s.call.origin,)) if o
    )
    defines = tuple(n for k in kernels for n in k.defines)
    writes = step_writes(parts[-1])
    return Kernel(
        name,
        (),
        (),
        tuple(reads),
        writes,
        defines=defines,
        origins=tuple(origins),
        parts=tuple(parts),
        machine=kernels[0].machine,
    )


def count(loops: tuple[Var, ...]) -> int:
    """Points of loops of known extents."""
    total = 1
    for v in loops:
        assert isinstance(v.extent, int)
        total *= v.extent
    return total


__all__ = [
    "HALF",
    "Factors",
    "Layouts",
    "as_one",
    "buffer_of",
    "coordinates",
    "count",
    "element_at",
    "has_values",
    "is_known",
    "is_plain",
    "loops_at",
    "operand",
    "readers_and_writers",
    "strides_of",
    "touched",
    "view_of",
]
