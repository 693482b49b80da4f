"""The pieces of a loop that was cut into many, as functions of their own: equal pieces are one function, and none is long.

A compiler takes more than twice as long for a function that is twice as long. The pieces of a concatenation mostly do the same with other buffers
and sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..ir.index import Expr, expr, sym
from ..ir.nodes import LoadAt, Node, rebuild
from ..tile.loops import FlatKernel
from .cpp_shared import Function, anonymous_body

START = "piece_start"
"""Where a piece begins in the loop that was cut, as an argument of its function: sums of many sizes are made once, one size after the other."""


def from_start(piece: FlatKernel) -> FlatKernel:
    """The piece with the place at which it begins replaced by `START`, where that makes an index shorter: `p + 12` is `p + START` then, and
    `(p + 12) * n`, which stands there as `n * p + 12 * n`, is `n * p + n * START`.
    """
    start, part = expr(piece.start), piece.part
    if start == 0:
        return piece

    def shorter(e: Expr) -> Expr:
        factor = expr(1) if part is None else e.coefficient(part)
        if factor is None or factor == 0:
            return e
        rest = e - factor * start
        return rest + factor * sym(START) if len(rest.terms) < len(e.terms) else e

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


def are_alike(bodies: Sequence[str], params: Mapping[str, str]) -> bool:
    """Whether at most half of the pieces are different: then functions for them are less to compile than the pieces themselves."""
    types = {**params, START: "int64_t"}
    return 2 * len({anonymous_body(body, types)[0] for body in bodies}) <= len(bodies)


def as_functions(
    name: str, params: Mapping[str, str], bodies: Sequence[str], starts: Sequence[str]
) -> tuple[list[Function], str]:
    """Functions for the bodies, and the lines that call them one after the other.

    params  the kernel's arguments: their C++ types by name.
    bodies  the lines of each piece.
    starts  by how much each begins after the one before it, as C++.
    """
    known: dict[tuple[str, ...], Function] = {}
    calls: list[str] = []
    types = {**params, START: "int64_t"}
    counted = any(START in body for body in bodies)
    if counted:
        calls.append(f"    int64_t {START} = 0;")
    for body, start in zip(bodies, starts, strict=True):
        text, used = anonymous_body(body, types)
        own = {w: types[w] for w in used}
        function = known.setdefault((text, *own.values()), Function(f"{name}_piece{len(known)}", own, body))
        if counted and start != "0":
            calls.append(f"    {START} += {start};")
        calls.append(f"    {function.name}({', '.join(used)});")
    return list(known.values()), "\n".join(calls)
