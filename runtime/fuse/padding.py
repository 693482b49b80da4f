"""Matrices whose rows do not start at whole vectors of memory: eager kernels that go through them are then slow, and a wider row costs little.

Only what lives inside of a graph is laid out so: its inputs and outputs keep the strides that they must have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..ir.index import product
from ..ir.nodes import ITEMSIZE, Buffer, Extern, Nest, Program, Size, contiguous_strides, coordinates, load, refs
from ..machine import Gpu

RowBytes = Callable[[Extern], int]


def copied_outputs(program: Program, row_bytes: RowBytes, gpu: Gpu) -> Program:
    """The program with a copy of each output that a call writes into such rows: the call may then have wider ones."""
    outs = {
        b.name: b
        for it in program.items
        if isinstance(it, Extern) and row_bytes(it)
        for b in it.outs
        if wider(b, row_bytes(it), gpu) is not None
    }
    wanted = {o.buffer for o in program.outputs if o.buffer in outs}
    written = {source for _, source in program.mutations}
    if not wanted - written:
        return program
    items = list(program.items)
    names = {}
    for b in (outs[name] for name in sorted(n for n in wanted - written if n is not None)):
        i = coordinates(b.shape)
        names[b.name] = f"{b.name}_rows"
        items.append(Nest(names[b.name], b.shape, b.dtype, i, load(b.name, i, b.dtype), origin="copy"))
    outputs = tuple(replace(o, buffer=names.get(o.buffer, o.buffer)) if o.buffer else o for o in program.outputs)
    return replace(program, items=items, outputs=outputs)


def pad_rows(
    program: Program, items: Sequence[Nest | Extern], views: Mapping[str, Nest], row_bytes: RowBytes, gpu: Gpu
) -> dict[str, tuple[Size, ...]]:
    """Strides with wider rows for the matrices inside of a graph that only such calls and loops read and write.

    views  nests that only say where something is.
    """
    fixed = {o.buffer for o in program.outputs} | {s for _, s in program.mutations} | {b.name for b in program.inputs}
    buffers: dict[str, Buffer] = {}
    asked: dict[str, int] = {}
    for it in items:
        if isinstance(it, Nest):
            if it.scatter is not None:
                fixed.add(it.name)
            if it.name not in views:
                buffers[it.name] = Buffer(it.name, it.shape, it.dtype)
            continue
        aligned = row_bytes(it)
        for b in it.outs:
            if aligned:
                buffers[b.name] = b
                asked[b.name] = aligned
        for name in {r.buffer for r in refs((it.args, tuple(v for _, v in it.kwargs)))}:
            while name in views and views[name].body.op == "load":
                name = views[name].body.attr.buffer
            if aligned:
                asked[name] = max(asked.get(name, 0), aligned)
            else:
                fixed.add(name)  # any other kernel may want the strides that it was traced with
    return {
        name: stride
        for name, aligned in asked.items()
        if name in buffers and name not in fixed and (stride := wider(buffers[name], aligned, gpu)) is not None
    }


def wider(b: Buffer, aligned: int, gpu: Gpu) -> tuple[Size, ...] | None:
    """Strides with which the rows of a matrix start at multiples of `aligned` bytes; None if they do, or if it is not worth it."""
    natural = contiguous_strides(b.shape)
    if b.dtype not in ITEMSIZE or len(b.shape) < 2 or (b.stride is not None and b.stride != natural):
        return None
    size, n, each = product(b.shape), b.shape[-1], ITEMSIZE[b.dtype]
    if not isinstance(n, int) or not isinstance(size, int) or size * each < gpu.costs.padded or n * each % aligned == 0:
        return None
    line = gpu.limits.line
    return contiguous_strides((*b.shape[:-1], -(-n * each // line) * line // each))


__all__ = ["copied_outputs", "pad_rows"]
