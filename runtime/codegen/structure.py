"""What a kernel is without the names of its buffers and registers: kernels of equal structure are one piece of code.

The layers of a model and the steps of an unrolled loop make the same kernels over and over. Comparing structures is much cheaper than printing
each and comparing texts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields
from typing import Any

from ..ir.index import Atom, Expr, Quotient, Val
from ..ir.nodes import Buffer, Node
from ..schedule.plan import Kernel, Reduce

__all__ = ["structure"]


def structure(kernel: Kernel, layouts: Mapping[str, Buffer]) -> Hashable:
    """Equal for two kernels only if the code of one, called with the other's buffers in the order of `reads` and `writes`, is the code of the
    other. None for a kernel that is made of other steps (`Kernel.parts`). Expressions and loop variables stand for themselves: equal ones are
    one object.
    """
    if kernel.parts:
        return None
    names: dict[str, int] = {}
    for name in (*kernel.reads, *kernel.writes, *(b.name for b in kernel.scratch)):
        names.setdefault(name, len(names))
    statements = [s for p in kernel.phases for s in p.body]
    for statement in statements:
        if isinstance(statement, Reduce):
            names.setdefault(statement.name, len(names))
    known = _Known(names)
    buffers = [layouts[b] for b in (*kernel.reads, *kernel.writes)]
    body = tuple((type(s), *(known.value(getattr(s, f.name)) for f in fields(s))) for s in statements)
    return (
        tuple(names[b] for b in (*kernel.reads, *kernel.writes)),
        len(kernel.reads),
        tuple((b.shape, b.dtype, b.stride, b.offset, b.paired) for b in (*buffers, *kernel.scratch)),
        kernel.outer,
        tuple((p.inner, len(p.body)) for p in kernel.phases),
        (kernel.serial, kernel.symbols, kernel.walk, kernel.tile, kernel.team),
        body,
        tuple(known.rows),
    )


class _Known:
    """Numbers for the nodes of one kernel, in the order in which they are met; `rows` says what each is."""

    def __init__(self, names: Mapping[str, int]) -> None:
        self.names = names
        self.rows: list[Hashable] = []
        self._numbers: dict[Node, int] = {}

    def value(self, x: Any) -> Hashable:
        """A field of a statement."""
        if isinstance(x, Node):
            return self._number(x)
        if isinstance(x, Expr):
            return self._index(x)
        if isinstance(x, tuple):
            return tuple(map(self.value, x))
        if isinstance(x, str):
            return self.names.get(x, x)
        return x  # type: ignore[no-any-return]

    def _number(self, root: Node) -> int:
        for n in root.walk(self._numbers.__contains__):
            row = (n.op, n.dtype, self._attribute(n), tuple(self._numbers[a] for a in n.args))
            self._numbers[n] = len(self.rows)
            self.rows.append(row)
        return self._numbers[root]

    def _attribute(self, n: Node) -> Hashable:
        if n.op == "load":
            return (self.names.get(n.attr.buffer, n.attr.buffer), *map(self._index, n.attr.index))
        if n.op == "index":
            return self._index(n.attr)
        if isinstance(n.attr, (int, float, bool)):  # 1 and True, 0.0 and -0.0 are two
            return (type(n.attr), repr(n.attr))
        return n.attr  # type: ignore[no-any-return]

    def _index(self, e: Expr) -> Hashable:
        """The expression itself, or, where values are used as positions, its terms with the numbers of their nodes."""
        if not any(isinstance(a, Val) for a in e.atoms()):
            return e
        return tuple((c, *map(self._atom, monomial)) for monomial, c in e.terms)

    def _atom(self, a: Atom) -> Hashable:
        if isinstance(a, Val):
            return (a.lo, a.hi, self._number(a.node))
        if isinstance(a, Quotient):
            return (a.kind, self._index(a.num), self._index(a.den))
        return a
