"""Whether it pays to substitute a value: by the arithmetic that is repeated, the bytes that are moved, and what waits in memory meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from ..ir.index import Expr, product
from ..ir.nodes import ITEMSIZE, Extern, Nest, Program
from ..ir.work import is_pointwise, is_view, node_cost, points_of
from ..machine import Machine

CHEAP = 3  # a body of this cost or less is recomputed rather than stored
SINGLE = 40  # … and of this cost, where it is a single value: its readers compute it before their loops
HELD = 2  # a value of so many results of eager kernels is stored where another such kernel runs before it is read: they are then free
PARTS = 40  # … or of this cost, where it is read in parts: each halving of a chain doubles the text of all before it
MANY = 1 << 62  # bytes of a value whose size is a symbol
SMALLER = 4  # part of the arithmetic, where a value is computed at more points than it has


def loses_nothing(nest: Nest, uses: int, consumers: list[Nest], costs: Callable[[str], float]) -> bool:
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


def _guarded(name: str, consumer: Nest) -> bool:
    return all(ld.args for ld in consumer.body.loads() if ld.attr.buffer == name) and consumer.scatter is None


def computed_once(items: list[Nest | Extern], stored: set[str]) -> set[str]:
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


# -- memory ------------------------------------------------------------------------------------------------------------
class Held:
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

    def waits_for_kernel(self, nest: Nest) -> bool:
        """Whether `HELD` results of eager kernels that nothing else reads would wait for one more such kernel."""
        if self.reader.get(nest.name, 0) <= self.before[nest.name]:
            return False
        return len({n.attr.buffer for n in nest.body.loads()} & self.single) >= HELD


class Traffic:
    """Bytes that are moved if a value is stored, and if its readers compute it. `views`: readers that strides over it are, once it is stored.
    The costs of the `machine` decide what is much.
    """

    def __init__(
        self,
        program: Program,
        readers: dict[str, list[Nest]],
        views: Container[str],
        items: Sequence[Nest | Extern],
        machine: Machine,
    ) -> None:
        self.readers, self.views, self.machine = readers, views, machine
        self.buffers = program.shapes()
        self.sources = {it.name: it.reads() for it in items if isinstance(it, Nest) and it.reduce is not None}

    def less(self, nest: Nest, cost: float) -> bool:
        """Whether the readers can compute `nest`, of that cost, for less than it takes to store it: at no more points than it has, and, each a
        kernel, reading no more bytes for it than one kernel that reads what it is made of and stores it and they who read it. What is small
        beside its readers' points (a value for each row) comes out of the cache, but is computed often: where the kernel of the sums that it is
        made of is another than its readers', it is stored by that one.
        """
        mine, readers = points_of(nest), self.readers.get(nest.name, [])
        if not isinstance(mine, int):
            return False
        within = all(isinstance(n, int) and n <= mine for n in map(points_of, readers))
        if cost > (self.machine.costs.recompute if within else self.machine.costs.recompute / SMALLER):
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
        often = all(isinstance(n, int) and n >= self.machine.costs.often * mine for n in map(points_of, readers))
        theirs = {name for c in readers for name in c.reads()}
        return bool(found and often) and all(theirs.isdisjoint(reads) for reads in found)

    def widens(self, nest: Nest) -> bool:
        """Whether readers that need each value often would read much more for it than the value, out of a cache that is too small for it."""
        mine, stored = points_of(nest), self.size(nest.name)
        own = sum(map(self.size, nest.reads()))
        often = [
            isinstance(n, int) and isinstance(mine, int) and n >= self.machine.costs.often * mine
            for n in map(points_of, self.readers.get(nest.name, []))
        ]
        return own > max(2 * stored, self.machine.costs.cached) and bool(often) and all(often)

    def size(self, name: str) -> int:
        """In bytes; of a size that is a symbol a great many."""
        b = self.buffers[name]
        n = product(b.shape)
        return n * ITEMSIZE[b.dtype] if isinstance(n, int) and b.dtype in ITEMSIZE else MANY


# -- readers -----------------------------------------------------------------------------------------------------------
def factors_of_products(
    items: list[Nest | Extern], points: Mapping[str, list[Nest]], stored: set[str]
) -> dict[str, list[Nest]]:
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
    return nest.body.op == "mul" and more(points_of(nest), points_of(factor)) and all(c.reduce == "sum" for c in sums)


def is_repeated(nest: Nest, readers: list[Nest], read: set[str]) -> bool:
    """Whether an eager kernel reads a view that repeats the value (a mask of all heads): strides over the value are less memory than the view's."""
    return any(c.name in read and is_view(c) and more(points_of(c), points_of(nest)) for c in readers)


def is_shared(nest: Nest, readers: list[Nest], views: Container[str]) -> bool:
    """Whether a value should be stored for views of it that eager kernels read or the graph returns: several, or one of all of it, are strides
    over it, and it stays at the loops of what it is computed from (sums whose result is returned in another shape).
    """
    found = [c for c in readers if c.name in views]
    return len(found) > 1 or (len(found) == len(readers) == 1 and points_of(found[0]) == points_of(nest))


def more(a: int | Expr, b: int | Expr) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a > b
