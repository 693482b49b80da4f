"""The pieces of a loop that was cut into many, as functions of their own: equal pieces are one function, and none is long.

A compiler takes more than twice as long for a function that is twice as long. The pieces of a concatenation mostly do the same with other buffers
and sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..ir.index import Expr, expr, sym
from ..ir.nodes import LoadAt, Node, rebuild
from .loops import FlatKernel

START = "piece_start"
"""Where a piece begins in the loop that was cut, as an argument of its function: sums of many sizes are made once, one size after the other."""

_WORD = re.compile(r"[A-Za-z_]\w*")


def from_start(piece: FlatKernel) -> FlatKernel:
    """The piece with the sum of sizes at which it begins replaced by `START`, where that makes an index shorter."""
    start = expr(piece.start)
    if start.is_const:
        return piece

    def shorter(e: Expr) -> Expr:
        rest = e - start
        return rest + sym(START) if len(rest.terms) < len(e.terms) else e

    def leaf(ld: Node) -> Node:
        return Node("load", ld.args, ld.dtype, LoadAt(ld.attr.buffer, tuple(map(shorter, ld.attr.index))))

    memo: dict[Node, Node] = {}
    phases = [
        replace(
            p,
            body=tuple(
                replace(
                    s,
                    value=rebuild(s.value, leaf, {}, memo),
                    where=None if s.where is None else shorter(s.where),
                    mask=None if s.mask is None else rebuild(s.mask, leaf, {}, memo),
                )
                for s in p.body
            ),
        )
        for p in piece.phases
    ]
    return replace(piece, phases=tuple(phases))


def as_functions(name: str, params: Mapping[str, str], bodies: Sequence[str], starts: Sequence[str]) -> tuple[str, str]:
    """Functions for the bodies, and the lines that call them one after the other.

    params  the kernel's arguments: their C++ types by name.
    bodies  the lines of each piece.
    starts  by how much each begins after the one before it, as C++.
    """
    known: dict[tuple[str, tuple[str, ...]], str] = {}
    functions: list[str] = []
    calls: list[str] = []
    types = {**params, START: "int64_t"}
    if any(START in body for body in bodies):
        calls.append(f"    int64_t {START} = 0;")
    for body, start in zip(bodies, starts, strict=True):
        used = [w for w in dict.fromkeys(_WORD.findall(body)) if w in types]
        loops = dict.fromkeys(re.findall(r"\b[a-z]+\d+(?:p\d+)+\b", body))
        table = {w: f"arg{k}_" for k, w in enumerate(used)} | {w: f"point{k}_" for k, w in enumerate(loops)}
        text = _WORD.sub(lambda m, table=table: table.get(m.group(), m.group()), body)  # type: ignore[misc]
        key = (text, tuple(types[w] for w in used))
        function = known.setdefault(key, f"{name}_piece{len(known)}")
        if len(known) > len(functions):
            arguments = ", ".join(f"{types[w]} {table[w]}" for w in used)
            functions.append(f"static __attribute__((noinline)) void {function}({arguments}) {{\n{text}\n}}\n")
        if calls and start != "0":
            calls.append(f"    {START} += {start};")
        calls.append(f"    {function}({', '.join(used)});")
    return "".join(functions), "\n".join(calls)
