"""Sums of rows in which at most one element is not 0, the one at a position that the row knows: that element, and no loop.

The gradient that a loss has for one class of each row is such a row, and the gradient of a softmax asks for its sum. Where rows of that length are
reduced anyway, its kernel then needs no loop more; elsewhere a kernel of rows is better than one of points that look up their row's values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir.index import of
from ..ir.nodes import Nest, Node, Program, const, identity_mapping, rebuild
from ..ir.work import is_pointwise

_DEPTH = 8  # values, one made of the other, that are looked through
_BOTH = ("and", "bitwise_and", "logical_and")


def one_hot_sums(program: Program) -> Program:
    """The program without such sums, where that spares a loop."""
    before: dict[str, Nest] = {}
    found: dict[str, Nest] = {}
    nests: dict[str, Nest] = {}
    for it in program.items:
        if not isinstance(it, Nest):
            continue
        if it.reduce == "sum" and len(it.rvars) == 1 and (body := _selected(it, nests)) is not None:
            before[it.name], found[it.name] = it, replace(it, body=body, rvars=(), reduce=None, cooperative=False)
        elif is_pointwise(it):
            nests[it.name] = it
    lengths = {
        it.rvars[-1].extent for it in program.items if isinstance(it, Nest) and it.rvars and it.name not in found
    }
    found = {name: nest for name, nest in found.items() if before[name].rvars[0].extent in lengths}
    if not found:
        return program
    items = [found.get(it.name, it) if isinstance(it, Nest) else it for it in program.items]
    return replace(program, items=items)


def _selected(nest: Nest, nests: Mapping[str, Nest]) -> Node | None:
    """What the only element is that a row can have, or 0; None for other rows."""
    (row,) = nest.rvars
    value, casts = _seen(nest.body, nests), list[Node]()
    while value.op == "to_dtype":
        casts.append(value)
        value = _seen(value.args[0], nests)
    if value.op != "where":
        return None
    condition, chosen, other = value.args
    other = _seen(other, nests)
    while other.op == "to_dtype":
        other = _seen(other.args[0], nests)
    if row in chosen.vars() or other.op != "const" or other.attr != 0:
        return None
    rest: list[Node] = []
    at: Node | None = None
    left = [condition]
    while left:
        n = _seen(left.pop(), nests)
        if n.op in _BOTH and n.dtype == "bool":
            left += n.args
        elif row not in n.vars():
            rest.append(n)
        elif at is None and n.op == "eq":
            sides = [_seen(a, nests) for a in n.args]
            known = [a for a in sides if row not in a.vars()]
            if len(known) != 1 or not any(a.op == "index" and a.attr == of(row) for a in sides):
                return None
            (at,) = known
        else:
            return None
    if at is None or at.dtype != "int64" or not isinstance(row.extent, int):
        return None
    rest += [at >= const(0, "int64"), at < const(row.extent, "int64")]
    inside = rest[0]
    for n in rest[1:]:
        inside = inside & n
    selected = Node("where", (inside, chosen, const(0, value.dtype)), value.dtype)
    for cast in reversed(casts):
        selected = Node("to_dtype", (selected,), cast.dtype, cast.attr)
    return selected


def _seen(n: Node, nests: Mapping[str, Nest]) -> Node:
    """A value, or what the one is made of that is loaded."""
    for _ in range(_DEPTH):
        if n.op != "load" or n.args or (nest := nests.get(n.attr.buffer)) is None:
            return n
        n = rebuild(nest.body, lambda _: None, identity_mapping(nest.vars, n.attr.index))
    return n
