"""Give every output, and every new content of an input, memory of its own: one that is an input, or stands in two places, becomes a copy.

Outputs that must share memory with an input or with each other never reach a program: dispatch makes those outside of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...generated.dispatch_tables import ROLES
from ..ir.nodes import DTYPES, Extern, Nest, Output, Program, Ref, Size, contiguous_strides, coordinates, load


def separate_outputs(program: Program, views: Iterable[str] = ()) -> Program:
    """The same program with a copying nest, or the eager kernel that copies where loops do not know the dtype, for each output or new content
    that would alias an input, an earlier one or a value of `views`.
    """
    table = program.shapes()
    taken = {*(b.name for b in program.inputs), *views}
    items = list(program.items)
    outputs: list[Output] = []
    mutations: list[tuple[str, str]] = []

    def own(buffer: str, suffix: str, stride: tuple[Size, ...] | None = None) -> str:
        if buffer in taken:
            b = table[buffer]
            buffer = f"{b.name}_{suffix}"
            if b.dtype in DTYPES:
                i = coordinates(b.shape)
                items.append(Nest(buffer, b.shape, b.dtype, i, load(b.name, i, b.dtype), origin="copy"))
            else:
                out = replace(b, name=buffer, stride=stride or contiguous_strides(b.shape))
                items.append(Extern((out,), str(ROLES["clone"]), (Ref(b.name),), origin="copy"))
        taken.add(buffer)
        return buffer

    for k, o in enumerate(program.outputs):
        outputs.append(o if o.buffer is None else replace(o, buffer=own(o.buffer, f"out{k}", o.stride)))
    for target, source in program.mutations:
        mutations.append((target, own(source, f"into_{target}")))
    if items == program.items:
        return program
    return Program(program.inputs, items, tuple(outputs), tuple(mutations), program.symbols)
