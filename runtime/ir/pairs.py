"""Complex numbers as pairs of reals: nothing in a program is complex. A complex tensor is a buffer of reals with one dimension more, the
last, of real and imaginary part; its `paired` says so to what is outside. While lowering, a complex elem is a node `pair` of its two parts.
"""

from __future__ import annotations

from collections.abc import Iterable

from .index import Expr, expr, size
from .nodes import Buffer, LoadAt, Node, Size, const, index_node, load

PART = {"complex64": "float32", "complex128": "float64"}
"""Complex dtype → that of its parts."""
WHOLE = {part: whole for whole, part in PART.items()}


def pair(real: Node, imag: Node) -> Node:
    """The complex elem of two parts of one dtype, float32 or float64."""
    return Node("pair", (real, imag), WHOLE[real.dtype])


def parts(x: Node) -> tuple[Node, Node]:
    """Real and imaginary part of an elem; that of a real one is 0."""
    return (x.args[0], x.args[1]) if x.op == "pair" else (x, const(0, x.dtype))


def element(buffer: str, index: Iterable[Size], dtype: str) -> Node:
    """The elem of a tensor at some coordinates."""
    if dtype not in PART:
        return load(buffer, index, dtype)
    at = tuple(index)
    return pair(*(load(buffer, (*at, k), PART[dtype]) for k in (0, 1)))


def part(x: Node, which: Expr) -> Node:
    """The real part of a complex elem where the coordinate `which` is 0, the imaginary one where it is 1: one expression where both parts
    are computed alike (of the sum of two tensors, the sum of what lies at one place), so that loops need not tell them apart.
    """
    first, second = parts(x)
    joined: dict[tuple[Node, Node], Node | None] = {}
    stack = [(first, second)]
    while stack:
        a, b = stack[-1]
        if (a, b) in joined:
            stack.pop()
        elif a is b:
            joined[a, b] = a
        elif (a.op, a.dtype, len(a.args)) != (b.op, b.dtype, len(b.args)):
            joined[a, b] = None
        elif missing := [p for p in zip(a.args, b.args, strict=True) if p not in joined]:
            stack += missing
        else:
            joined[a, b] = _joined(a, b, [joined[p] for p in zip(a.args, b.args, strict=True)], which)
    whole = joined[first, second]
    return _chosen(first, second, which) if whole is None else whole


def _joined(a: Node, b: Node, args: list[Node | None], which: Expr) -> Node | None:
    if a.op == "const":
        return _chosen(a, b, which)
    known = [x for x in args if x is not None]
    if len(known) < len(args):
        return None
    if a.op == "load":
        at = [_coordinate(x, y, which) for x, y in zip(a.attr.index, b.attr.index, strict=False)]
        index = tuple(x for x in at if x is not None)
        same = a.attr.buffer == b.attr.buffer and len(index) == len(at)
        return Node("load", tuple(known), a.dtype, LoadAt(a.attr.buffer, index)) if same else None
    return Node(a.op, tuple(known), a.dtype, a.attr) if a.attr == b.attr else None


def _coordinate(x: Expr, y: Expr, which: Expr) -> Expr | None:
    return x if x == y else which if x == 0 and y == 1 else None


def _chosen(first: Node, second: Node, which: Expr) -> Node:
    is_first = Node("eq", (index_node(which), const(0, "int64")), "bool")
    return Node("where", (is_first, first, second), first.dtype)


def outside(b: Buffer) -> Buffer:
    """A buffer as a caller or an eager kernel has it: of a paired one the complex tensor."""
    if not b.paired:
        return b
    stride = None if b.stride is None else tuple(size(expr(s) // 2) for s in b.stride[:-1])
    return Buffer(b.name, b.shape[:-1], WHOLE[b.dtype], stride, size(expr(b.offset) // 2))


def inside(b: Buffer) -> Buffer:
    """A buffer as a program has it: of a complex tensor the pairs of its parts, unless their dtype has no loop code."""
    if b.dtype not in PART or b.stride is None:
        return b
    stride = (*(size(expr(s) * 2) for s in b.stride), 1)
    return Buffer(b.name, (*b.shape, 2), PART[b.dtype], stride, size(expr(b.offset) * 2), True)


__all__ = ["PART", "WHOLE", "element", "inside", "outside", "pair", "part", "parts"]
