"""What a kernel is without the names of its buffers and registers: kernels of equal structure are one piece of code.

The layers of a model and the steps of an unrolled loop make the same kernels over and over. Comparing structures is much cheaper than printing
each and comparing texts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..ir.index import Atom, Expr, Quotient, Val
from ..ir.nodes import Buffer, Node, contiguous_strides, walk_all
from .plan import Kernel, Reduce, Statement

__all__ = ["Structure", "structure"]


@dataclass(frozen=True)
class Structure:
    """`key`: equal for two kernels only if the code of one, called with the other's buffers in the order of `reads` and `writes`, each moved by
    the difference of their `starts`, is the code of the other.

    starts  of each buffer, the elements before the slice that the kernel goes through: a step of an unrolled loop reads one row of its input.
    """

    key: Hashable
    starts: tuple[int, ...]


def structure(kernel: Kernel, layouts: Mapping[str, Buffer]) -> Structure | None:
    """None for a kernel that is made of other steps (`Kernel.parts`). Expressions and loop variables stand for themselves: equal ones are one
    object.
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
    buffers = {b: layouts[b] for b in (*kernel.reads, *kernel.writes)}
    known = _Known(names, _fixed(statements, buffers))
    body = tuple((type(s), *known.statement(s)) for s in statements)
    key = (
        tuple(names[b] for b in (*kernel.reads, *kernel.writes)),
        len(kernel.reads),
        tuple((b.shape, b.dtype, b.stride, b.offset, b.paired) for b in (*buffers.values(), *kernel.scratch)),
        kernel.outer,
        tuple((p.inner, len(p.body)) for p in kernel.phases),
        (kernel.serial, kernel.symbols, kernel.grid_loop, kernel.tile, kernel.splits),
        body,
        tuple(known.rows),
    )
    return Structure(key, tuple(known.start(b) for b in buffers.values()))


def _fixed(statements: Sequence[Statement], buffers: Mapping[str, Buffer]) -> dict[str, dict[int, int]]:
    """The dimensions of each buffer, with strides that are numbers, in which all accesses are to one constant coordinate, and which."""
    found: dict[str, dict[int, int]] = {}
    roots = [x for s in statements for f in fields(s) if isinstance(x := getattr(s, f.name), Node)]
    accesses = [(n.attr.buffer, n.attr.index) for n in walk_all(roots) if n.op == "load"]
    accesses += [(s.buffer, s.index) for s in statements if not isinstance(s, Reduce)]
    accesses += [(n.attr.buffer, n.attr.index) for s in statements for n in _positions(s) if n.op == "load"]
    for name, index in accesses:
        if (buffer := buffers.get(name)) is None:
            continue
        strides = buffer.stride if buffer.stride is not None else contiguous_strides(buffer.shape)
        here = {d: int(e) for d, e in enumerate(index) if e.is_const and isinstance(strides[d], int)}
        before = found.setdefault(name, here)
        found[name] = {d: c for d, c in before.items() if here.get(d) == c}
    return found


def _positions(statement: Statement) -> Iterable[Node]:
    """Nodes of the values that a store uses as positions."""
    index = () if isinstance(statement, Reduce) else statement.index
    return walk_all(a.node for e in index for a in e.atoms() if isinstance(a, Val))


class _Known:
    """Numbers for the nodes of one kernel, in the order in which they are met; `rows` says what each is."""

    def __init__(self, names: Mapping[str, int], fixed: Mapping[str, Mapping[int, int]]) -> None:
        self.names = names
        self.fixed = fixed
        self.rows: list[Hashable] = []
        self._numbers: dict[Node, int] = {}

    def start(self, buffer: Buffer) -> int:
        """Elements before what is accessed of a buffer."""
        strides = buffer.stride if buffer.stride is not None else contiguous_strides(buffer.shape)
        return sum(c * int(strides[d]) for d, c in self.fixed.get(buffer.name, {}).items())

    def statement(self, s: Statement) -> Iterable[Hashable]:
        """The fields of a statement."""
        for f in fields(s):
            value = getattr(s, f.name)
            yield self._place(s.buffer, value) if f.name == "index" and not isinstance(s, Reduce) else self.value(value)

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
            return (self.names.get(n.attr.buffer, n.attr.buffer), *self._place(n.attr.buffer, n.attr.index))
        if n.op == "index":
            return self._index(n.attr)
        if isinstance(n.attr, (int, float, bool)):  # 1 and True, 0.0 and -0.0 are two
            return (type(n.attr), repr(n.attr))
        return n.attr  # type: ignore[no-any-return]

    def _place(self, buffer: str, index: Sequence[Expr]) -> tuple[Hashable, ...]:
        fixed = self.fixed.get(buffer, {})
        return tuple("fixed" if d in fixed else self._index(e) for d, e in enumerate(index))

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
