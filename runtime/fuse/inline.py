"""Substitute producers into consumers: views always, cheap or single-use pointwise values where nothing is computed twice at a loss."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..ir.nodes import Buffer, Extern, Nest, Node, Program, refs
from ..ir.work import is_pointwise, is_view, node_cost, points_of
from ..machine import Machine
from .faults import checked_where_constant, may_fault, visits_all
from .profitability import (
    PARTS,
    Held,
    Traffic,
    computed_once,
    factors_of_products,
    is_repeated,
    is_shared,
    loses_nothing,
    more,
)
from .substitution import Inliner

FEW = 64  # part of a value's elements that a reader computes for itself


def inline(
    program: Program, costs: Callable[[str], float], machine: Machine, strided: Container[str] = ()
) -> tuple[list[Nest | Extern], Inliner]:
    """Return the items left, with substituted bodies, and the inliner (it knows the views that externs and outputs refer to).

    costs    of an operation, by its name.
    machine  it decides what work is worth.
    strided  arguments of library calls with gaps or repeated elements: what such a view shows is stored, so that strides can express it.
    """
    items = eliminate_dead(program)
    roles = _Roles.of(program, items)
    views = Inliner(program.shapes())
    staged, based = _substitute_views(items, roles, views, strided)
    return _ValueInliner(program, staged, roles, views, based, costs, machine).run(), views


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


@dataclass(frozen=True)
class _Roles:
    """Buffers that must, or may have to, be in memory.

    pinned        what the program returns or stores into its inputs.
    extern_reads  arguments of library calls.
    scatter_bases  what indexed updates start from.
    checking      what is read at a position that is checked, and is the same at all positions.
    """

    pinned: set[str]
    extern_reads: set[str]
    scatter_bases: set[str]
    checking: set[str]

    @classmethod
    def of(cls, program: Program, items: list[Nest | Extern]) -> _Roles:
        pinned = {o.buffer for o in program.outputs if o.buffer is not None} | {src for _, src in program.mutations}
        calls = [it for it in items if isinstance(it, Extern)]
        extern_reads = {r.buffer for it in calls for r in refs((it.args, tuple(v for _, v in it.kwargs)))}
        scatter_bases = {it.scatter.base for it in items if isinstance(it, Nest) and it.scatter is not None}
        return cls(pinned, extern_reads, scatter_bases, checked_where_constant(items))


# -- views -------------------------------------------------------------------------------------------------------------
def _substitute_views(
    items: list[Nest | Extern], roles: _Roles, views: Inliner, strided: Container[str]
) -> tuple[list[Nest | Extern], set[str]]:
    """The items without views, but for those that may have to be stored; and what arguments of library calls are views of."""
    staged: list[Nest | Extern] = []
    based: set[str] = set()
    for item in items:
        if isinstance(item, Nest):
            original, item = item, views.apply(item)
            if is_view(item) and item.name not in roles.scatter_bases and item.name not in roles.checking:
                if item.name in strided:
                    item = _over_memory(original, item, views, staged, based)
                views.bodies[item.name] = item
                if item.name in roles.pinned or item.name in roles.extern_reads:
                    staged.append(item)  # realized later if strides cannot express it
                continue
        staged.append(item)
    return staged, based


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


# -- values ------------------------------------------------------------------------------------------------------------
class _ValueInliner:
    """Substitutes values in the order of the program. Facts that decide are gathered from all items before the first is substituted."""

    def __init__(
        self,
        program: Program,
        staged: list[Nest | Extern],
        roles: _Roles,
        views: Inliner,
        based: set[str],
        costs: Callable[[str], float],
        machine: Machine,
    ) -> None:
        self.staged, self.roles, self.views = staged, roles, views
        self.costs, self.machine = costs, machine
        self.uses, self.readers = _readers(staged)
        self.stored = {*views.bodies, *roles.pinned, *roles.extern_reads, *roles.scatter_bases, *based}
        self.computed_once = computed_once(staged, self.stored)
        self.held = Held(staged, self.uses)
        self.factors = factors_of_products(staged, self.readers, self.stored)
        self.traffic = Traffic(program, {**self.readers, **self.factors}, views.bodies, staged, machine)
        self.shapes = views.shapes
        self.faulty: dict[Node, bool] = {}

    def run(self) -> list[Nest | Extern]:
        """The items left."""
        values = Inliner(self.shapes)
        left: list[Nest | Extern] = []
        pointwise: dict[str, Nest] = {}  # what is left of them
        for item in self.staged:
            if isinstance(item, Nest):
                named = item.reads()  # and not what is substituted for that, which grows
                item = values.apply(item)
                if not self.machine.costs.recompute:
                    item = _with_few(item, named, pointwise, self.shapes)
                if self._is_substituted(item):
                    values.bodies[item.name] = item
                    continue
                cheap = is_pointwise(item) and node_cost(item.body, self.costs, PARTS) <= PARTS
                if cheap and not may_fault(item.body, self.faulty):
                    pointwise[item.name] = item
            left.append(item)
        return left

    def _is_substituted(self, nest: Nest) -> bool:
        if not is_pointwise(nest) or nest.name in self.stored or nest.name in self.roles.checking:
            return False
        readers = self.readers.get(nest.name, [])
        if not self._is_profitable(nest, readers):
            return False
        if may_fault(nest.body, self.faulty) and not any(visits_all(c, nest) for c in readers):
            return False
        if self.held.waits_for_kernel(nest) or is_repeated(nest, readers, self.roles.extern_reads - self.roles.pinned):
            return False
        return not (
            self.machine.costs.recompute and (self.traffic.widens(nest) or is_shared(nest, readers, self.views.bodies))
        )

    def _is_profitable(self, nest: Nest, readers: list[Nest]) -> bool:
        """Whether the readers, or the products that a value is a factor of, compute it at no loss."""
        products = self.factors.get(nest.name, [])
        if any(more(points_of(c), points_of(nest) * self.machine.costs.factor) for c in products):
            return False
        if nest.name in self.computed_once and nest.name not in self.factors:
            return True
        if loses_nothing(nest, self.uses.get(nest.name, 0), self.factors.get(nest.name, readers), self.costs):
            return True
        if not self.machine.costs.recompute:
            return False
        return self.traffic.less(nest, node_cost(nest.body, self.costs, self.machine.costs.recompute))


def _readers(items: Sequence[Nest | Extern]) -> tuple[dict[str, int], dict[str, list[Nest]]]:
    """How often each buffer is read (by a library call as if it were twice), and the nests that read it."""
    uses: dict[str, int] = {}
    readers: dict[str, list[Nest]] = {}
    for item in items:
        if isinstance(item, Nest):
            loads = [n.attr.buffer for n in item.body.loads()]
            for name in item.reads():
                uses[name] = uses.get(name, 0) + max(1, loads.count(name))
                readers.setdefault(name, []).append(item)
        else:
            for name in item.reads():
                uses[name] = uses.get(name, 0) + 2
    return uses, readers


def _with_few(nest: Nest, named: Iterable[str], pointwise: Mapping[str, Nest], shapes: Mapping[str, Buffer]) -> Nest:
    """A nest that computes for itself what it reads few elements of (a loss reads one of each row): for others these may stay in registers.
    `named`: what it reads.
    """
    for _ in range(FEW.bit_length()):
        few = {n: p for n in named if (p := pointwise.get(n)) and more(points_of(p), points_of(nest) * FEW)}
        if not few:
            break
        inliner = Inliner(shapes)
        inliner.bodies = few
        nest = inliner.apply(nest)
        named = nest.reads()
    return nest
