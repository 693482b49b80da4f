"""Give every output memory of its own: one that is an input, or stands in two places, becomes a copy.

Outputs that must share memory with an input or with each other never reach a program: dispatch makes those outside of it.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import UnsupportedError
from ..ir.nodes import DTYPES, Nest, Output, Program, coordinates, load


def separate_outputs(program: Program) -> Program:
    """The same program with a copying nest for each output that would alias an input or an earlier output.

    Raises `UnsupportedError` where loops cannot copy it (a complex tensor).
    """
    table = program.shapes()
    taken = {b.name for b in program.inputs}
    items = list(program.items)
    outputs: list[Output] = []
    for k, o in enumerate(program.outputs):
        if o.buffer is not None and o.buffer in taken:
            b = table[o.buffer]
            if b.dtype not in DTYPES:
                raise UnsupportedError(f"output {k} is a copy of {b.name}, of dtype {b.dtype}")
            i = coordinates(b.shape)
            name = f"{b.name}_out{k}"
            items.append(Nest(name, b.shape, b.dtype, i, load(b.name, i, b.dtype), origin="copy"))
            o = replace(o, buffer=name)
        if o.buffer is not None:
            taken.add(o.buffer)
        outputs.append(o)
    if items == program.items:
        return program
    return Program(program.inputs, items, tuple(outputs), program.mutations, program.symbols)
