"""What the steps of a plan read and write, and where their buffers are."""

from __future__ import annotations

from ..ir.index import Expr, Var, expr, recombine
from ..ir.nodes import ITEMSIZE, Buffer, Node, Size, contiguous_strides
from .plan import CopyStep, KernelStep, Plan, Step, ViewOf


def flat_index(index: tuple[Expr, ...], layout: Buffer) -> Expr:
    """Position in elements from the start of the storage."""
    stride = layout.stride if layout.stride is not None else contiguous_strides(layout.shape)
    total = expr(layout.offset)
    for e, s in zip(index, stride, strict=True):
        total = total + e * s
    return recombine(total)


def strided_view(vars_: tuple[Expr, ...], shape: tuple[Size, ...], body: Node, layout: Buffer) -> ViewOf | None:
    """The view that a pure load describes, if strides can express it."""
    if body.op != "load" or body.args:
        return None
    flat = flat_index(body.attr.index, layout)
    strides: list[Size] = []
    rest = flat
    for v, _ in zip(vars_, shape, strict=True):
        if v.var is None:
            strides.append(1)
            continue
        c = flat.coefficient(v.var)
        if c is None or any(k < 0 for _, k in c.terms):
            return None  # tensors have no negative strides
        strides.append(int(c) if c.is_const else c)
        rest = rest - c * v
    if any(isinstance(a, Var) for a in rest.atoms()) or any(
        isinstance(s, Expr) and any(isinstance(a, Var) for a in s.atoms()) for s in strides
    ):
        return None
    # A size-1 dimension has no coefficient: give it the stride a contiguous tensor would have there.
    natural = contiguous_strides(shape)
    strides = [s if v.var is not None else n for s, v, n in zip(strides, vars_, natural, strict=True)]
    return ViewOf(body.attr.buffer, shape, tuple(strides), int(rest) if rest.is_const else rest)


def nbytes(b: Buffer) -> int | None:
    """Bytes from the first element of a buffer to the end of its last one; None if a size is symbolic."""
    last = 0
    for n, s in zip(b.shape, contiguous_strides(b.shape) if b.stride is None else b.stride, strict=True):
        if not isinstance(n, int) or not isinstance(s, int):
            return None
        if n == 0:
            return 0 if b.dtype in ITEMSIZE else None
        last += (n - 1) * s
    return (last + 1) * ITEMSIZE[b.dtype] if b.dtype in ITEMSIZE else None


def step_reads(step: Step) -> tuple[str, ...]:
    if isinstance(step, KernelStep):
        return step.kernel.reads
    if isinstance(step, CopyStep):
        return (step.source,)
    names: dict[str, None] = {}
    stack: list[object] = [step.args, tuple(v for _, v in step.kwargs)]
    while stack:
        x = stack.pop()
        if isinstance(x, (list, tuple)):
            stack.extend(x)
        elif hasattr(x, "buffer"):
            names.setdefault(x.buffer)
    return tuple(names)


def step_writes(step: Step) -> tuple[str, ...]:
    if isinstance(step, KernelStep):
        return step.kernel.writes
    if isinstance(step, CopyStep):
        return ()
    return tuple(b.name for b in step.call.outs)


def step_parts(step: Step) -> tuple[Step, ...]:
    """The steps that a kernel runs as one."""
    return step.kernel.parts if isinstance(step, KernelStep) else ()


def arena_offset(plan: Plan, name: str) -> int:
    """Bytes from the start of the arena, through in-place updates."""
    place = plan.allocations[name]
    return place.offset + (arena_offset(plan, place.of) if place.kind == "alias" else 0)


def allocation_root(plan: Plan, name: str) -> str:
    """The buffer that owns the memory of `name`, which may be an in-place update of it."""
    place = plan.allocations[name]
    return allocation_root(plan, place.of) if place.kind == "alias" else name
