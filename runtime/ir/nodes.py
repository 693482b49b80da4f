"""The loop IR: hash-consed scalar expressions, nests, extern calls and programs.

A program is functional: every buffer is defined once, and loads use logical coordinates (one index expression per dimension of the
buffer's logical shape), so that a layout can be chosen after fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

from .index import Atom, Expr, Val, Var, bounds, expr, of, size
from .operators import Operators

Size = int | Expr
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTS = ("uint8", "int8", "int16", "int32", "int64")
DTYPES = (*FLOATS, *INTS, "bool")
ITEMSIZE = dict(zip(DTYPES, (2, 2, 4, 8, 1, 1, 2, 4, 8, 1), strict=True))


class Node(Operators):
    """One scalar operation. Equal nodes are the same object.

    op      a name of `scalars.yaml`, or `const` (attr: the value), `index` (attr: an Expr; int64), `load` (attr: `LoadAt`;
            args: () or (mask,), a masked load gives 0 where the mask is false and touches no memory there), or `bounded`
            (args: value, n, live; attr: exception type, message): `value` where 0 <= value < n, else 0 and, where `live`, a fault.
    dtype   of the result, as a string.

    `==` is identity, as nodes are dictionary keys; the spec language prints `a == b` as a call of the scalar `eq`.
    """

    __slots__ = ("__weakref__", "_atoms", "_children", "_key", "_loads", "_text", "args", "attr", "dtype", "op")
    _key: str | None
    _text: str | None
    _atoms: frozenset[Var] | None
    _loads: tuple[Node, ...] | None
    _children: tuple[Node, ...] | None
    op: str
    args: tuple[Node, ...]
    dtype: str
    attr: Any

    def __new__(cls, op: str, args: tuple[Node, ...], dtype: str, attr: Any = None) -> Node:
        tag = (type(attr).__name__, repr(attr)) if isinstance(attr, (int, float, bool)) else attr
        key = (op, args, dtype, tag)
        found = _NODES.get(key)
        if found is not None:
            return found
        new = super().__new__(cls)
        new.op, new.args, new.dtype, new.attr = op, args, dtype, attr
        new._key = new._text = new._atoms = new._loads = new._children = None
        return _NODES.setdefault(key, new)

    @property
    def key(self) -> str:
        """Digest of the whole expression with dtypes and extents: unique, and equal in every process (`text` is neither unique nor short)."""
        if self._key is None:
            for n in self.walk(lambda n: n._key is not None):
                index = n.attr.index if n.op == "load" else (n.attr,) if n.op == "index" else ()
                name = (
                    n.attr.buffer
                    if n.op == "load"
                    else ""
                    if n.op == "index"
                    else f"{type(n.attr).__name__} {n.attr!r}"
                )
                parts = (n.op, n.dtype, name, *(e.key for e in index), "|", *(a._key for a in n.args))
                n._key = blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
        return self._key  # type: ignore[return-value]

    @property
    def text(self) -> str:
        """Stable text of the whole expression (a tree; `ir.dump` prints shared parts once)."""
        if self._text is None:
            if self.op == "const":
                self._text = f"{self.attr!r}:{self.dtype}"
            elif self.op == "index":
                self._text = f"[{self.attr.text}]"
            elif self.op == "load":
                mask = f" if {self.args[0].text}" if self.args else ""
                self._text = f"{self.attr}{mask}"
            else:
                args = ", ".join(a.text for a in self.args)
                suffix = f":{self.dtype}" if self.op in ("to_dtype", "bitcast") else ""
                self._text = f"{self.op}({args}){suffix}"
        return self._text

    def __repr__(self) -> str:
        return self.text if len(self.args) < 4 else f"<{self.op}>"

    # -- structure -----------------------------------------------------------------------------------------------------
    def walk(self, skip: Callable[[Node], bool] | None = None) -> Iterator[Node]:
        """Every node once, arguments before users (also the nodes inside indirect indices), except those where `skip` holds."""
        return walk_all((self,), skip)

    def children(self) -> tuple[Node, ...]:
        """Arguments, and the nodes used as indirect indices."""
        if self._children is None:
            index = self.attr.index if self.op == "load" else (self.attr,) if self.op == "index" else ()
            self._children = self.args + tuple(v.node for e in index for v in _values(e))
        return self._children

    def vars(self) -> frozenset[Var]:
        """Loop variables that the value depends on."""
        if self._atoms is None:
            for n in self.walk(
                lambda n: n._atoms is not None
            ):  # not recursive: bodies may be thousands of operations deep
                found: set[Var] = set()
                for c in n.children():
                    found |= c._atoms  # type: ignore[arg-type]
                for e in n.attr.index if n.op == "load" else (n.attr,) if n.op == "index" else ():
                    found |= {a for a in e.atoms() if isinstance(a, Var)}
                n._atoms = frozenset(found)
        return self._atoms  # type: ignore[return-value]

    def mentions(self, var: Atom) -> bool:
        return var in self.vars()

    def loads(self) -> tuple[Node, ...]:
        """Every load node once, in a stable order."""
        if self._loads is None:
            self._loads = tuple(n for n in self.walk() if n.op == "load")
        return self._loads


_NODES: WeakValueDictionary[tuple, Node] = WeakValueDictionary()


def _values(e: Expr) -> list[Val]:
    return sorted((a for a in e.atoms() if isinstance(a, Val)), key=lambda v: v.text)


@dataclass(frozen=True)
class LoadAt:
    """Where a load reads: buffer name and one logical coordinate per dimension."""

    buffer: str
    index: tuple[Expr, ...]

    def __str__(self) -> str:
        return f"{self.buffer}[{', '.join(e.text for e in self.index)}]"


def const(value: int | float | bool, dtype: str) -> Node:
    if dtype == "bool":
        return Node("const", (), dtype, bool(value))
    return Node("const", (), dtype, float(value) if dtype in FLOATS else int(value))


def load(buffer: str, index: Iterable[Size], dtype: str, mask: Node | None = None) -> Node:
    return Node("load", () if mask is None else (mask,), dtype, LoadAt(buffer, tuple(expr(e) for e in index)))


def index_node(e: Size) -> Node:
    """An index expression as an int64 scalar value."""
    e = expr(e)
    atom = e.atom
    if e.is_const:
        return const(int(e), "int64")
    if isinstance(atom, Val):
        return atom.node
    return Node("index", (), "int64", e)


def indirect(node: Node, lo: int | None, hi: int | None) -> Expr:
    """An integer scalar node used as an index, promised to be in lo..hi."""
    if node.op == "const":
        return expr(int(node.attr))
    if node.op == "index":
        return node.attr
    return of(Val(node, lo, hi))


def rebuild(
    node: Node,
    leaf: Callable[[Node], Node | None],
    mapping: Mapping[Atom, Size],
    memo: dict[Node, Node] | None = None,
    on_check: Callable[[Node], Node] | None = None,
) -> Node:
    """Copy an expression, replacing loop variables by `mapping`, each load (after its index was mapped) by `leaf(load)` if not None,
    and each `bounded` by `on_check` of it.
    """
    memo = {} if memo is None else memo

    def on_value(v: Val) -> Expr:
        return indirect(memo[v.node], v.lo, v.hi)

    for n in node.walk(memo.__contains__):
        if n.op == "load":
            index = tuple([e.subst(mapping, on_value) for e in n.attr.index])
            same = index == n.attr.index and all(memo[a] is a for a in n.args)
            new = n if same else load(n.attr.buffer, index, n.dtype, memo[n.args[0]] if n.args else None)
            memo[n] = new if (replaced := leaf(new)) is None else replaced
        elif n.op == "index":
            memo[n] = index_node(n.attr.subst(mapping, on_value))
        elif not n.args:
            memo[n] = n
        else:
            args = tuple([memo[a] for a in n.args])
            memo[n] = n if args == n.args else Node(n.op, args, n.dtype, n.attr)
            if n.op == "bounded" and on_check is not None:
                memo[n] = on_check(memo[n])
    return memo[node]


# -- programs ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Buffer:
    """A named tensor of the program as the outside sees it: logical shape and, where it matters, strides (in elements) and offset.

    paired  outside it is a complex tensor, without the last dimension, which holds real and imaginary part.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str
    stride: tuple[Size, ...] | None = None
    offset: Size = 0
    paired: bool = False


def walk_all(roots: Iterable[Node], skip: Callable[[Node], bool] | None = None) -> Iterator[Node]:
    """What `Node.walk` gives, of several expressions together: what they share is met once."""
    seen: set[Node] = set()
    for root in roots:
        stack: list[Node | None] = [root]
        while stack:
            node = stack.pop()
            if node is None:  # stands above a node whose children have been met
                yield stack.pop()  # type: ignore[misc]
                continue
            if node in seen or (skip is not None and skip(node)):
                continue
            seen.add(node)
            if not (children := node._children or node.children()):
                yield node
                continue
            stack += (node, None)
            stack += [a for a in reversed(children) if a not in seen]


@dataclass(frozen=True)
class Nest:
    """Defines buffer `name`: for every point of `vars` (one index expression per dimension: a variable, or 0 for extent 1).

    Plain: the value is `body`. With `reduce` (a name in `scalars.yaml: reductions`): the reduction of `body` over `rvars`.
    With `scan` (a name in `scalars.yaml: scans`): the running value along the dimension `scan_dim`.
    With `scatter`: the buffer starts as a copy of `scatter.base` (same shape and dtype); then for every point of `domain`, in order,
    element `scatter.index` is set to (or combined with, by reduction `scatter.mode`) `body`; skipped where `scatter.mask` is false.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str
    vars: tuple[Expr, ...]
    body: Node
    rvars: tuple[Var, ...] = ()
    reduce: str | None = None
    scan: str | None = None
    scan_dim: int = -1
    scatter: Scatter | None = None
    origin: str = ""
    stride: tuple[Size, ...] | None = (
        None  # strides that eager gives this result, if dense; the layout when it is stored
    )
    cooperative: bool = False  # several programs of a device reduce one point together

    @property
    def loop_vars(self) -> tuple[Var, ...]:
        return tuple(v.var for v in self.vars if v.var is not None)  # type: ignore[misc]

    def reads(self) -> tuple[str, ...]:
        """Names of the buffers read, in a stable order."""
        names = [n.attr.buffer for n in self.body.loads()]
        if self.scatter is not None:
            names.append(self.scatter.base)
            for e in self.scatter.index:
                names += [n.attr.buffer for v in _values(e) for n in v.node.loads()]
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class Scatter:
    base: str
    index: tuple[Expr, ...]
    mode: str  # "set" or a reduction name
    domain: tuple[Var, ...]
    mask: Node | None = None
    unordered: bool = False  # mode "set": of several values for one element any one may stay


@dataclass(frozen=True)
class Ref:
    """A buffer as an argument of an extern call (views are nests of their own; the scheduler turns them into strides where it can).

    stride  the strides that the traced program gave this argument: the layout that the eager kernel is known to work well with.
    paired  the kernel takes a complex tensor.
    """

    buffer: str
    stride: tuple[Size, ...] | None = None
    paired: bool = False


@dataclass(frozen=True)
class Extern:
    """A call of an eager kernel. `args`/`kwargs` may hold `Ref`s at any depth (lists and tuples); other leaves are plain data or sizes.

    outs    one Buffer per tensor result, with the strides that the kernel gives it; a sparse tensor has none (only calls and the caller read it).
    target  registered name of the overload, `namespace.name.overload`; "" where nothing is called, but sizes are computed and checked.
    places  of `outs` among the kernel's results, where others (numbers, None) lie between or after them.
    writes  it writes into so many of its first arguments and returns nothing: `outs` are these afterwards. What was None had no contents.
    learns  sizes that are known from here on (`learned.Learned`); `demands`: conditions on them, Python source, and what a RuntimeError says.
    """

    outs: tuple[Buffer, ...]
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    single: bool = True  # the kernel returns one tensor, not a tuple
    effect: bool = False  # must run even if no result is used
    origin: str = ""
    places: tuple[int, ...] = ()
    compiled: bool = False  # no kernel: `target` is a function that comes with the program, made of compiled graphs
    writes: int = 0
    learns: tuple[Any, ...] = ()
    demands: tuple[tuple[str, str], ...] = ()
    whole: bool = False  # no result may be a view (`MetadataError`): the program writes to it, which eager's autograd refuses for views
    elsewhere: bool = False  # a result is on another device than the graph, whose memory it cannot be in

    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(r.buffer for r in refs((self.args, tuple(v for _, v in self.kwargs)))))


def is_paired(call: Extern) -> bool:
    """Whether an eager kernel takes or returns complex tensors."""
    return any(b.paired for b in call.outs) or any(r.paired for r in refs((call.args, [v for _, v in call.kwargs])))


def refs(tree: Any) -> Iterator[Ref]:
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for leaf in tree:
            yield from refs(leaf)


@dataclass(frozen=True)
class Output:
    """One result of the program: a buffer by name with the strides that the caller must see (`paired`: as a complex tensor), or a size, or
    a constant.
    """

    buffer: str | None
    stride: tuple[Size, ...] | None = None
    value: Any = None
    paired: bool = False


@dataclass
class Program:
    """A whole graph. `mutations` maps an input to the buffer whose contents it must hold when the program ends."""

    inputs: tuple[Buffer, ...]
    items: list[Nest | Extern] = field(default_factory=list)
    outputs: tuple[Output, ...] = ()
    mutations: tuple[tuple[str, str], ...] = ()
    symbols: tuple[str, ...] = ()

    def shapes(self) -> dict[str, Buffer]:
        """Every buffer by name."""
        table = {b.name: b for b in self.inputs}
        for item in self.items:
            if isinstance(item, Extern):
                table.update((b.name, b) for b in item.outs)
            else:
                table[item.name] = Buffer(item.name, item.shape, item.dtype)
        return table


def contiguous_strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Row-major strides in elements; a size-1 or empty dimension counts as 1, as torch does."""
    strides: list[Size] = []
    step: Size = 1
    for n in reversed(shape):
        strides.append(step)
        step = step * (max(n, 1) if isinstance(n, int) else n)
    return tuple(size(s) for s in reversed(strides))


def coordinates(shape: tuple[Size, ...], prefix: str = "i") -> tuple[Expr, ...]:
    """Canonical variables of a shape: `i0`, `i1`, …; 0 where the extent is 1."""
    return tuple(of(Var(f"{prefix}{k}", size(n))) for k, n in enumerate(shape))


def identity_mapping(vars_: Iterable[Expr], values: Iterable[Size]) -> dict[Atom, Size]:
    """From the loop variables in `vars_` (constants skipped) to `values`."""
    return {v.var: x for v, x in zip(vars_, values, strict=True) if v.var is not None}


__all__ = [
    "DTYPES", "FLOATS", "INTS", "ITEMSIZE", "Buffer", "Expr", "Extern", "LoadAt", "Nest", "Node", "Output",
    "Program", "Ref", "Scatter", "Size", "Var", "bounds", "const", "contiguous_strides", "coordinates",
    "identity_mapping", "index_node", "indirect", "is_paired", "load", "rebuild", "refs",
]  # fmt: skip
