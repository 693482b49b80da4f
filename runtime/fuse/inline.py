"""Substitute producers into consumers: views always, cheap or single-use pointwise values where nothing is computed twice at a loss."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace

from ..ir.facts import covers
from ..ir.fold import fold
from ..ir.guards import checks, masked
from ..ir.index import Atom, Expr, Val, Var, expr, of, product, proves_less, proves_nonnegative
from ..ir.nodes import (
    ITEMSIZE,
    Buffer,
    Extern,
    Nest,
    Node,
    Program,
    Scatter,
    Size,
    identity_mapping,
    indirect,
    rebuild,
    refs,
)
from ..ir.work import is_pointwise, node_cost, points_of

CHEAP = 3  # a body of this cost or less is recomputed rather than stored
SINGLE = 40  # … and of this cost, where it is a single value: its readers compute it before their loops
HELD = 2  # a value of so many results of eager kernels is stored where another such kernel runs before it is read: they are then free
PARTS = 40  # … or of this cost, where it is read in parts: each halving of a chain doubles the text of all before it
FEW = 64  # part of a value's elements that a reader computes for itself
MANY = 1 << 62  # bytes of a value whose size is a symbol
OFTEN, CACHE = 8, 1 << 17  # times that a value is read; bytes
#: Readings of a factor of a matrix product for which it is computed once: by the rows, or the columns, of a block.
BLOCK = 128
SMALLER = 4  # part of the arithmetic, where a value is computed at more points than it has


def is_view(item: Nest | Extern) -> bool:
    """No arithmetic at all: a load, a constant or a coordinate. A load at a data-dependent place counts as arithmetic."""
    if not is_pointwise(item):
        return False
    assert isinstance(item, Nest)
    body = item.body
    if body.op == "load":
        return not body.args and not any(isinstance(a, Val) for e in body.attr.index for a in e.atoms())
    return body.op in ("const", "index")


class Inliner:
    """Holds the bodies that are substituted away; each (producer, index) pair is expanded once."""

    def __init__(self, shapes: Mapping[str, Buffer]) -> None:
        self.shapes = shapes
        self.bodies: dict[str, Nest] = {}
        self.cache: dict[tuple[str, tuple[Expr, ...]], Node] = {}
        self.folded: dict[Node, Node] = {}

    def expand(self, ld: Node) -> Node | None:
        nest = self.bodies.get(ld.attr.buffer)
        if nest is None:
            return None
        if ld.attr.index == nest.vars:
            node: Node | None = nest.body  # the very point: nothing to rename, however long the body has become
        else:
            key = (nest.name, ld.attr.index)
            node = self.cache.get(key)
            if node is None:
                node = rebuild(nest.body, _keep, identity_mapping(nest.vars, ld.attr.index))
                self.cache[key] = node
        assert node is not None
        if not ld.args:
            return node
        # A row's sum beside the padding of its elements, rows that are padded in memory: a mask would cost more than the memory that it spares.
        return masked(node, ld.args[0], {x for x in node.loads() if _there(x, self.shapes)})

    def apply(self, nest: Nest) -> Nest:
        """The nest with every load of a substituted buffer expanded."""
        if not any(name in self.bodies for name in nest.reads()):
            return nest
        memo: dict[Node, Node] = {}
        # What was data (positions made by a range) may have become coordinates: comparisons of those are decided here.
        body = fold(rebuild(nest.body, self.expand, {}, memo), self.folded)
        scatter = nest.scatter
        if scatter is not None:
            scatter = map_scatter(scatter, lambda n: fold(rebuild(n, self.expand, {}, memo), self.folded))
        return replace(nest, body=body, scatter=scatter)


def _there(ld: Node, shapes: Mapping[str, Buffer]) -> bool:
    """Whether the load, at coordinates, stays inside of its buffer at every point of the loops."""
    if ld.args or any(isinstance(a, Val) for e in ld.attr.index for a in e.atoms()):
        return False
    sizes = shapes[ld.attr.buffer].shape
    return all(proves_nonnegative(e) and proves_less(e, expr(n)) for e, n in zip(ld.attr.index, sizes, strict=True))


def map_scatter(scatter: Scatter, on_node: Callable[[Node], Node]) -> Scatter:
    """Rewrite the nodes inside an indexed update (its indirect indices and its mask)."""

    def on_value(v: Val) -> Expr:
        return indirect(on_node(v.node), v.lo, v.hi)

    index = tuple(e.subst({}, on_value) for e in scatter.index)
    return replace(scatter, index=index, mask=None if scatter.mask is None else on_node(scatter.mask))


def _keep(_: Node) -> None:
    return None


def eliminate_dead(program: Program) -> list[Nest | Extern]:
    """Items that something needs, in order. Extern calls stay only if a result is used (effects are kept by the caller's flags)."""
    live = {o.buffer for o in program.outputs if o.buffer is not None} | {src for _, src in program.mutations}
    kept: list[Nest | Extern] = []
    for item in reversed(program.items):
        names = [b.name for b in item.outs] if isinstance(item, Extern) else [item.name]
        if any(n in live for n in names) or (isinstance(item, Extern) and item.effect):
            live.update(item.reads())
            kept.append(item)
    return kept[::-1]


def inline(
    program: Program, costs: Callable[[str], float], recompute: float = 0, strided: Container[str] = ()
) -> tuple[list[Nest | Extern], Inliner]:
    """Return the items left, with substituted bodies, and the inliner (it knows the views that externs and outputs refer to).

    recompute  a value of this cost or less is computed by each of its readers where that moves fewer bytes than storing and reading it.
    strided    arguments of library calls with gaps or repeated elements: what such a view shows is stored, so that strides can express it.
    """
    items = eliminate_dead(program)
    pinned = {o.buffer for o in program.outputs if o.buffer is not None} | {src for _, src in program.mutations}
    extern_reads = {
        r.buffer for it in items if isinstance(it, Extern) for r in refs((it.args, tuple(v for _, v in it.kwargs)))
    }
    scatter_bases = {it.scatter.base for it in items if isinstance(it, Nest) and it.scatter is not None}

    checking = _checking(items)
    shapes = program.shapes()
    views = Inliner(shapes)
    staged: list[Nest | Extern] = []
    based: set[str] = set()  # what arguments of library calls are views of
    for item in items:
        if isinstance(item, Nest):
            original, item = item, views.apply(item)
            if is_view(item) and item.name not in scatter_bases and item.name not in checking:
                if item.name in strided:
                    item = _over_memory(original, item, views, staged, based)
                views.bodies[item.name] = item
                if item.name in pinned or item.name in extern_reads:
                    staged.append(item)  # realized later if strides cannot express it
                continue
        staged.append(item)

    uses: dict[str, int] = {}
    points: dict[str, list[Nest]] = {}
    for item in staged:
        if isinstance(item, Nest):
            loads = [n.attr.buffer for n in item.body.loads()]
            for name in item.reads():
                uses[name] = uses.get(name, 0) + max(1, loads.count(name))
                points.setdefault(name, []).append(item)
        else:
            for name in item.reads():
                uses[name] = uses.get(name, 0) + 2

    stored = {*views.bodies, *pinned, *extern_reads, *scatter_bases, *based}
    homes = _homes(staged, stored)
    holds = _Holds(staged, uses)
    factors = _factors(staged, points, stored)
    traffic = _Traffic(program, {**points, **factors}, views.bodies, staged)
    values = Inliner(shapes)
    faulty: dict[Node, bool] = {}
    left: list[Nest | Extern] = []
    pointwise: dict[str, Nest] = {}  # what is left of them
    for item in staged:
        if isinstance(item, Nest):
            named = item.reads()  # and not what is substituted for that, which grows
            item = values.apply(item)
            if not recompute:
                item = _with_few(item, named, pointwise, shapes)
            if (
                is_pointwise(item)
                and item.name not in stored
                and item.name not in checking
                and not any(_more(points_of(c), points_of(item) * BLOCK) for c in factors.get(item.name, []))
                and (
                    (item.name in homes and item.name not in factors)
                    or _pays(item, uses.get(item.name, 0), factors.get(item.name, points.get(item.name, [])), costs)
                    or (recompute and traffic.less(item, node_cost(item.body, costs, recompute), recompute))
                )
                and (not _may_fault(item.body, faulty) or any(_visits_all(c, item) for c in points.get(item.name, [])))
                and not holds.too_much(item)
                and not _is_repeated(item, points.get(item.name, []), extern_reads - pinned)
                and not (recompute and (traffic.widens(item) or _is_shared(item, points.get(item.name, []), views)))
            ):
                values.bodies[item.name] = item
                continue
            if is_pointwise(item) and node_cost(item.body, costs, PARTS) <= PARTS and not _may_fault(item.body, faulty):
                pointwise[item.name] = item
        left.append(item)
    return left, views


def _with_few(nest: Nest, named: Iterable[str], pointwise: Mapping[str, Nest], shapes: Mapping[str, Buffer]) -> Nest:
    """A nest that computes for itself what it reads few elements of (a loss reads one of each row): for others these may stay in registers.
    `named`: what it reads.
    """
    for _ in range(FEW.bit_length()):
        few = {n: p for n in named if (p := pointwise.get(n)) and _more(points_of(p), points_of(nest) * FEW)}
        if not few:
            break
        inliner = Inliner(shapes)
        inliner.bodies = few
        nest = inliner.apply(nest)
        named = nest.reads()
    return nest


def _is_repeated(nest: Nest, readers: list[Nest], read: set[str]) -> bool:
    """Whether an eager kernel reads a view that repeats the value (a mask of all heads): strides over the value are less memory than the view's."""
    return any(c.name in read and is_view(c) and _more(points_of(c), points_of(nest)) for c in readers)


def _over_memory(original: Nest, view: Nest, views: Inliner, staged: list[Nest | Extern], based: set[str]) -> Nest:
    """The view of a buffer that is `based`, which is to say stored: `view` itself, if it loads anything, else the `original` one of constants or
    coordinates, which are then stored, too.
    """
    if view.body.op == "load":
        based.add(view.body.attr.buffer)
        return view
    if original.body.op != "load" or original.body.args:
        return view
    source = original.body.attr.buffer
    if source not in based:
        based.add(source)
        nest = views.bodies.pop(source)
        if not any(it is nest for it in staged):
            staged.append(nest)
    return original


def _is_shared(nest: Nest, readers: list[Nest], views: Inliner) -> bool:
    """Whether a value should be stored for views of it that eager kernels read or the graph returns: several, or one of all of it, are strides
    over it, and it stays at the loops of what it is computed from (sums whose result is returned in another shape).
    """
    found = [c for c in readers if c.name in views.bodies]
    return len(found) > 1 or (len(found) == len(readers) == 1 and points_of(found[0]) == points_of(nest))


def _factors(items: list[Nest | Extern], points: Mapping[str, list[Nest]], stored: set[str]) -> dict[str, list[Nest]]:
    """What the factors of matrix products (sums of products, converted to a wider dtype) are made of, and who multiplies them: stored as it is,
    and converted where it is read, such a value is half of the bytes, and one that matrix units take.
    """
    found: dict[str, list[Nest]] = {}
    for item in items:
        if not isinstance(item, Nest) or not is_pointwise(item) or item.name in stored:
            continue
        if item.body.op != "to_dtype" or (source := item.body.args[0]).op != "load":
            continue
        wider, readers = ITEMSIZE[item.dtype] > ITEMSIZE[source.dtype], points.get(item.name, [])
        if wider and readers and all(_is_product(c, item, points) for c in readers):
            found.setdefault(source.attr.buffer, []).extend(readers)
    return found


def _is_product(nest: Nest, factor: Nest, points: Mapping[str, list[Nest]]) -> bool:
    """Whether a nest multiplies a value at more points than it has, and is added up."""
    sums = [nest] if nest.reduce is not None else points.get(nest.name, [])
    return nest.body.op == "mul" and _more(points_of(nest), points_of(factor)) and all(c.reduce == "sum" for c in sums)


def _more(a: int | Expr, b: int | Expr) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a > b


def _checking(items: list[Nest | Extern]) -> set[str]:
    """Pointwise values, views among them, that are read at a checked position in a dimension along which they are all the same: substituted,
    nothing would be left of the position, nor of its check.
    """
    found: set[str] = set()
    at: dict[str, set[int]] = {}  # dimensions of a buffer in which positions are checked
    for item in reversed(items):
        if isinstance(item, Extern):
            continue
        moving: set[Var] = set()
        if is_pointwise(item) and item.name in at:
            own = [item.vars[k].var for k in at[item.name]]
            if any(v is None or not item.body.mentions(v) for v in own):
                found.add(item.name)
            else:
                moving = {v for v in own if v is not None}
        for ld in item.body.loads():
            for k, e in enumerate(ld.attr.index):
                atoms = e.atoms()
                positions = [a.node for a in atoms if isinstance(a, Val)]
                if not moving.isdisjoint(atoms) or any(
                    checks([n]) or not moving.isdisjoint(n.vars()) for n in positions
                ):
                    at.setdefault(ld.attr.buffer, set()).add(k)
    return found


class _Holds:
    """What substituting a value would keep in memory: sums of many products, for one, would all be waited for until the last is there."""

    def __init__(self, items: list[Nest | Extern], uses: dict[str, int]) -> None:
        self.single = {b.name for it in items if isinstance(it, Extern) for b in it.outs if uses.get(b.name) == 1}
        self.before: dict[str, int] = {}  # eager kernels before each nest
        self.reader: dict[str, int] = {}  # and before the first reader of each buffer
        kernels = 0
        for it in items:
            if isinstance(it, Nest):
                self.before[it.name] = kernels
            for name in it.reads():
                self.reader.setdefault(name, kernels)
            kernels += isinstance(it, Extern)

    def too_much(self, nest: Nest) -> bool:
        """Whether `HELD` results of eager kernels that nothing else reads would wait for one more such kernel."""
        if self.reader.get(nest.name, 0) <= self.before[nest.name]:
            return False
        return len({n.attr.buffer for n in nest.body.loads()} & self.single) >= HELD


class _Traffic:
    """Bytes that are moved if a value is stored, and if its readers compute it. `views`: readers that strides over it are, once it is stored."""

    def __init__(
        self,
        program: Program,
        readers: dict[str, list[Nest]],
        views: Container[str],
        items: Sequence[Nest | Extern],
    ) -> None:
        self.readers, self.views = readers, views
        self.buffers = program.shapes()
        self.sources = {it.name: it.reads() for it in items if isinstance(it, Nest) and it.reduce is not None}

    def less(self, nest: Nest, cost: float, most: float) -> bool:
        """Whether the readers can compute `nest`, of that cost, for less than it takes to store it: at no more points than it has, and, each a
        kernel, reading no more bytes for it than one kernel that reads what it is made of and stores it and they who read it. What is small
        beside its readers' points (a value for each row) comes out of the cache, but is computed often: where the kernel of the sums that it is
        made of is another than its readers', it is stored by that one.
        """
        mine, readers = points_of(nest), self.readers.get(nest.name, [])
        if not isinstance(mine, int):
            return False
        within = all(isinstance(n, int) and n <= mine for n in map(points_of, readers))
        if cost > (most if within else most / SMALLER):
            return False
        own = sum(map(self.size, nest.reads()))
        stored = mine * ITEMSIZE[nest.dtype]
        if not within:
            return own <= SMALLER * stored and not (cost > CHEAP and self.ends_elsewhere(nest, mine, readers))
        others = [c for c in readers if c.name not in self.views]
        again = sum(self.size(n) for c in others for n in nest.reads() if n not in c.reads())
        # What an eager kernel reads a view of is stored in any case.
        return again <= len(others) * stored + (own + stored if len(others) == len(readers) else 0)

    def ends_elsewhere(self, nest: Nest, mine: int, readers: list[Nest]) -> bool:
        """Whether readers that need each value often read nothing that the reductions read which it is made of."""
        found = [self.sources[name] for name in nest.reads() if name in self.sources]
        often = all(isinstance(n, int) and n >= OFTEN * mine for n in map(points_of, readers))
        theirs = {name for c in readers for name in c.reads()}
        return bool(found and often) and all(theirs.isdisjoint(reads) for reads in found)

    def widens(self, nest: Nest) -> bool:
        """Whether readers that need each value often would read much more for it than the value, out of a cache that is too small for it."""
        mine, stored = points_of(nest), self.size(nest.name)
        own = sum(map(self.size, nest.reads()))
        often = [
            isinstance(n, int) and isinstance(mine, int) and n >= OFTEN * mine
            for n in map(points_of, self.readers.get(nest.name, []))
        ]
        return own > max(2 * stored, CACHE) and bool(often) and all(often)

    def size(self, name: str) -> int:
        """In bytes; of a size that is a symbol a great many."""
        b = self.buffers[name]
        n = product(b.shape)
        return n * ITEMSIZE[b.dtype] if isinstance(n, int) and b.dtype in ITEMSIZE else MANY


def _homes(items: list[Nest | Extern], stored: set[str]) -> set[str]:
    """Pointwise values that one nest alone needs, at one place and at no more points than they have, though perhaps through several values
    that end up in it themselves: substituted, they are still computed once.
    """
    homes: dict[str, tuple[str, tuple[Expr, ...]]] = {}  # the nest, and the place in its coordinates
    needed_at: dict[str, set[tuple[str, tuple[Expr, ...]]]] = {}
    elsewhere: set[str] = set()
    points: dict[str, int | Expr] = {}
    for item in reversed(items):
        if isinstance(item, Extern) or item.scatter is not None:
            elsewhere.update(item.reads())
            continue
        name = item.name
        points[name] = points_of(item)
        if is_pointwise(item) and name not in stored and name not in elsewhere and len(needed_at.get(name, ())) == 1:
            (home,) = needed_at[name]
            mine, theirs = points[name], points[home[0]]
            if mine == theirs or (isinstance(mine, int) and isinstance(theirs, int) and theirs <= mine):
                homes[name] = home
        for ld in item.body.loads():
            if ld.args:
                elsewhere.add(ld.attr.buffer)
            elif name in homes and ld.attr.index == item.vars:
                needed_at.setdefault(ld.attr.buffer, set()).add(homes[name])
            else:
                needed_at.setdefault(ld.attr.buffer, set()).add((name, ld.attr.index))
    return set(homes)


def _may_fault(body: Node, memo: dict[Node, bool]) -> bool:
    """Whether a position is checked in `body`. `memo`: what is known of the bodies it was made from."""
    for n in body.walk(memo.__contains__):
        memo[n] = n.op == "bounded" or any(memo[c] for c in n.children())
    return memo[body]


def _pays(nest: Nest, uses: int, consumers: list[Nest], costs: Callable[[str], float]) -> bool:
    """Whether substituting `nest` loses nothing: one use at no more points than it has, or so cheap that storing costs more."""
    if node_cost(nest.body, costs, CHEAP) <= CHEAP and len({n.attr for n in nest.body.loads()}) <= 1:
        return True
    if points_of(nest) == 1 and node_cost(nest.body, costs, SINGLE) <= SINGLE:
        return True
    if uses > 1:
        return node_cost(nest.body, costs, PARTS) <= PARTS and _read_in_parts(nest, consumers)
    if all(_guarded(nest.name, c) for c in consumers):
        return True  # a slice of a concatenation or the inside of a padding: evaluated at its own points only
    mine = points_of(nest)
    others = [points_of(c) for c in consumers]
    if all(isinstance(mine, int) and isinstance(n, int) and n <= mine for n in others):
        return True
    return all(n == mine for n in others)


def _read_in_parts(nest: Nest, consumers: list[Nest]) -> bool:
    """Whether all readings together are at no more points than the nest has (the gates of a recurrent cell, halves): substituted, it is computed
    no more often than it would be stored.
    """
    if any(c.scatter is not None for c in consumers):
        return False
    total: int | Expr = 0
    for c in consumers:
        total = total + points_of(c) * sum(ld.attr.buffer == nest.name for ld in c.body.loads())
    mine = points_of(nest)
    return isinstance(mine, int) and isinstance(total, int) and 0 < total <= mine


def _visits_all(consumer: Nest, nest: Nest) -> bool:
    """Whether the consumer's value needs every element of `nest`: else a fault in those left out would be lost."""
    loops = consumer.scatter.domain if consumer.scatter is not None else (*consumer.loop_vars, *consumer.rvars)
    return any(
        ld.attr.buffer == nest.name and _meets_all(ld, nest.shape, {v for v in loops if v.extent != 1})
        for ld in consumer.body.loads()
    )


def _meets_all(ld: Node, shape: tuple[Size, ...], loops: set[Var]) -> bool:
    """Whether the load, where its mask holds, meets every element: coordinates that are loop variables of their own, moved by constants."""
    steps: dict[Atom, Expr] = {}
    for e, n in zip(ld.attr.index, shape, strict=True):
        moving = [v for v in loops if e.coefficient(v) != 0]
        if not moving and e == 0 and n == 1:
            continue
        if len(moving) != 1 or moving[0] in steps or e.coefficient(moving[0]) != 1:
            return covers(ld.attr.index, shape, tuple(loops)) and not ld.args
        start = e - of(moving[0])
        first, past = -start, expr(n) - start
        if not proves_nonnegative(first) or proves_less(expr(moving[0].extent), past):
            return False
        if not proves_nonnegative(expr(moving[0].extent) - past):
            return False
        steps[moving[0]] = of(Var(f"{moving[0].name}_at", n)) - start
    if not ld.args:
        return True
    mask = fold(rebuild(ld.args[0], _keep, steps))
    return mask.op == "const" and bool(mask.attr)


def _guarded(name: str, consumer: Nest) -> bool:
    return all(ld.args for ld in consumer.body.loads() if ld.attr.buffer == name) and consumer.scatter is None
