"""Give every output, and every new content of an input, memory of its own: one that is an input, or stands in two places, becomes a copy.

Outputs that must share memory with an input or with each other never reach a program: dispatch makes those outside of it.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import UnsupportedError
from ..ir.nodes import DTYPES, Nest, Output, Program, coordinates, load


def separate_outputs(program: Program) -> Program:
    """The same program with a copying nest for each output or new content that would alias an input or an earlier one.

    Raises `UnsupportedError` where loops cannot copy it (a complex tensor).
    """
    table = program.shapes()
    taken = {b.name for b in program.inputs}
    items = list(program.items)
    outputs: list[Output] = []
    mutations: list[tuple[str, str]] = []

    def own(buffer: str, suffix: str, what: str) -> str:
        if buffer in taken:
            b = table[buffer]
            if b.dtype not in DTYPES:
                raise UnsupportedError(f"{what} is a copy of {b.name}, of dtype {b.dtype}")
            i = coordinates(b.shape)
            buffer = f"{b.name}_{suffix}"
            items.append(Nest(buffer, b.shape, b.dtype, i, load(b.name, i, b.dtype), origin="copy"))
        taken.add(buffer)
        return buffer

    for k, o in enumerate(program.outputs):
        outputs.append(o if o.buffer is None else replace(o, buffer=own(o.buffer, f"out{k}", f"output {k}")))
    for target, source in program.mutations:
        mutations.append((target, own(source, f"into_{target}", f"the new content of {target}")))
    if items == program.items:
        return program
    return Program(program.inputs, items, tuple(outputs), tuple(mutations), program.symbols)
