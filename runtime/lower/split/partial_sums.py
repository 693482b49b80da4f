"""Reductions of many values to few, cut into reductions of parts and one of the parts' results: so that a GPU has work for all of it.

A matrix is cut by its rows, so that a part may share a kernel with what else reads the row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from ....generated.scalars import REDUCTIONS
from ....generated.targets import Split
from ...ir.index import Atom, Expr, Var, of, product
from ...ir.nodes import Extern, Nest, Program, Size, contiguous_strides, load, rebuild
from ...ir.work import cost, is_pointwise, node_cost, points_of
from ...machine import Gpu
from .partial_variance import ParallelVariance, fresh


def partial_reductions(
    program: Program, gpu: Gpu, cooperative: Collection[str] = (), costly: Collection[str] = ()
) -> Program:
    """The program with long reductions in two steps, where far fewer programs would share the work than the GPU should have; those that are `costly`
    count as long. Reductions of which parts cannot be combined (positions of maxima) stay; so do those of symbolic sizes, and those that are
    `cooperative`.
    """
    items: list[Nest | Extern] = []
    names = set(program.shapes())
    rows = _Rows(program, gpu)
    variances: ParallelVariance | None = None
    for item in program.items:
        if isinstance(item, Nest) and item.name in cooperative:
            items.append(replace(item, cooperative=True))
            continue
        parts = _cut(item, names, rows, item.name in costly) if isinstance(item, Nest) else None
        if parts and isinstance(item, Nest):
            variances = variances or ParallelVariance(program, names)
            if (found := variances.parallel(item, parts[0].name)) is None:
                variances.note(item, parts)
            parts = found or parts
        items += parts or [item]
    if len(items) == len(program.items) and not cooperative:
        return program
    return Program(program.inputs, items, program.outputs, program.mutations, program.symbols)


def read_again(program: Program, gpu: Gpu) -> frozenset[str]:
    """Reductions along memory for which there are too few rows, and whose rows are gone through once more for each of their elements when it is
    known what they are reduced to: several programs may go through a row together, and keep it until then.
    """
    nests = [item for item in program.items if isinstance(item, Nest)]
    rows = _Rows(program, gpu)
    found: set[str] = set()
    for k, nest in enumerate(nests):
        if _starving(nest, rows, gpu.costs.split.values) is None or _is_outer_reduction(nest, rows.strides):
            continue
        points = product(v.extent for v in (*nest.loop_vars, *nest.rvars))
        known = {nest.name}  # what is made of the result
        for later in nests[k + 1 :]:
            if known.isdisjoint(later.reads()):
                continue
            if product(v.extent for v in (*later.loop_vars, *later.rvars)) == points:
                found.add(nest.name)
                break
            known.add(later.name)
    return frozenset(found)


def costly_reductions(program: Program, split: Split, costs: Callable[[str], float] = cost) -> frozenset[str]:
    """Reductions of fewer values to one, each of which costs so much, with all that is computed for it point by point, that one program would be long
    at it (`costs` of a scalar operation, in additions). Nothing else goes through these points: it would share the kernel, and its values, no more.
    """
    nests: dict[str, Nest] = {}
    at: dict[int, list[Nest]] = {}  # nests by the number of their points
    found: set[str] = set()
    for item in program.items:
        if isinstance(item, Nest) and isinstance(n := points_of(item), int):
            nests[item.name] = item
            at.setdefault(n, []).append(item)
    for nest in nests.values():
        n = points_of(nest)
        assert isinstance(n, int)
        if nest.reduce is None or product(nest.shape) != 1 or not 2 * split.row <= n <= split.values:
            continue
        kernel, total, left = {nest.name}, node_cost(nest.body, costs), [*nest.reads()]
        sources: set[str] = set()
        while left:
            name = left.pop()
            made = nests.get(name)
            if made is None or not is_pointwise(made) or points_of(made) != n:
                sources.add(name)
            elif name not in kernel:
                kernel.add(name)
                total += node_cost(made.body, costs)
                left += made.reads()
        others = (o for o in at[n] if o.name not in kernel)
        if n * total > split.values * split.cost and all((kernel | sources).isdisjoint(o.reads()) for o in others):
            found.add(nest.name)
    return frozenset(found)


def _starving(nest: Nest, rows: _Rows, small: int) -> int | None:
    """How many programs a long reduction has, of more than `small` values, if these are too few."""
    if nest.reduce is None or REDUCTIONS[nest.reduce].combine is None or nest.scatter is not None:
        return None
    outer, inner = product(nest.shape), product(v.extent for v in nest.rvars)
    if not isinstance(outer, int) or not isinstance(inner, int) or outer * inner <= small:
        return None
    have = -(-outer // rows.split.columns) if _is_outer_reduction(nest, rows.strides) else outer
    return have if 4 * have < rows.programs else None


def _cut(nest: Nest, names: set[str], rows: _Rows, costly: bool) -> list[Nest] | None:
    split = rows.split
    have = _starving(nest, rows, 0 if costly else split.values)
    outer, inner = product(nest.shape), product(v.extent for v in nest.rvars)
    if have is None or not isinstance(outer, int) or not isinstance(inner, int):
        return None
    columns = _is_outer_reduction(nest, rows.strides)
    if columns and rows.shares(nest):
        # Programs that go through the rows will add them up on their way: the more they are, the more parts.
        wanted = min(rows.programs * max(1, split.elements // outer), inner // split.rows)
    else:
        wanted = min(-(-rows.programs // have), inner // (split.column if columns else split.row))
    cuts = _parts(nest.rvars, wanted, 4 * wanted if costly else split.parts)
    if not cuts:
        return None
    name = fresh(f"{nest.name}_parts", names)
    places: dict[Atom, int | Expr] = {}
    steps: list[Var] = []
    rvars: list[Var] = []
    for r in nest.rvars:
        count = cuts.get(r, 1)
        assert isinstance(r.extent, int)
        part = r.extent // count
        s, rest = Var(f"{r.name}s", count), Var(f"{r.name}p", part) if count > 1 else r
        if count > 1:
            steps.append(s)
            places[r] = of(s) * part + (of(rest) if part > 1 else 0)
        if part > 1:
            rvars.append(rest)
    body = rebuild(nest.body, lambda _: None, places)
    counts, at = tuple(s.extent for s in steps), tuple(map(of, steps))
    parts = replace(
        nest,
        name=name,
        shape=(*counts, *nest.shape),
        vars=(*at, *nest.vars),
        body=body,
        rvars=tuple(rvars),
        stride=None,
    )
    total = replace(nest, body=load(name, (*at, *nest.vars), nest.dtype), rvars=tuple(steps))
    return [parts, total]


class _Rows:
    """Which stored values a program reduces by rows, and how many programs a GPU should have for a reduction."""

    def __init__(self, program: Program, gpu: Gpu) -> None:
        self.programs, self.split = gpu.costs.programs * gpu.num_sms, gpu.costs.split
        # Those that are known: of inputs, calls, and of nests that eager lays out in its own way.
        self.strides = {name: b.stride for name, b in program.shapes().items()}
        self.strides.update((item.name, item.stride) for item in program.items if isinstance(item, Nest))
        self.leaves: dict[str, frozenset[str]] = {}  # the stored values that each pointwise one is made of
        self.by_rows: set[str] = set()
        for item in program.items:
            if not isinstance(item, Nest) or item.scan is not None or item.scatter is not None:
                continue
            if item.reduce is None:
                self.leaves[item.name] = self.of(item)
                if item.stride is None:
                    self.strides[item.name] = self._as_most(item)
            elif not _is_outer_reduction(item, self.strides):
                self.by_rows |= self.of(item)

    def _as_most(self, nest: Nest) -> tuple[Size, ...] | None:
        """What is made point by point is laid out as most of what it is made of; None: row-major, also where as many are."""
        same = {ld.attr.buffer for ld in nest.body.loads() if ld.attr.index == nest.vars}
        votes = Counter(self.strides.get(name) for name in same)
        votes[None] += votes.pop(contiguous_strides(nest.shape), 0)
        return max(votes, key=lambda stride: (votes[stride], stride is None))

    def of(self, nest: Nest) -> frozenset[str]:
        """What a value is made of that has as many elements as it has points, or more."""
        points = product(v.extent for v in (*nest.loop_vars, *nest.rvars))
        full = [ld.attr.buffer for ld in nest.body.loads() if product(v.extent for v in ld.vars()) == points]
        return frozenset().union(*(self.leaves.get(b, frozenset((b,))) for b in full))

    def shares(self, nest: Nest) -> bool:
        return not self.by_rows.isdisjoint(self.of(nest))


def _is_outer_reduction(nest: Nest, strides: Mapping[str, tuple[Size, ...] | None]) -> bool:
    """Whether neighbours in memory belong to different results: of most loads, the index that memory follows moves with a loop of the result."""
    votes = 0  # weighted by the elements that a load meets
    for ld in nest.body.loads():
        steps = strides.get(ld.attr.buffer)
        near = steps.index(1) if steps and 1 in steps else -1
        if steps:  # of several dimensions with that step, the one that is more than one element long
            near = next((k for k, s in enumerate(steps) if s == 1 and not ld.attr.index[k].is_const), near)
        atoms = set(ld.attr.index[near].atoms()) if ld.attr.index else set()
        met = product(v.extent for v in ld.vars())
        if not isinstance(met, int):
            met = 1
        if not ld.vars().isdisjoint(nest.rvars):
            votes += met * (bool(atoms & set(nest.loop_vars)) - bool(atoms & set(nest.rvars)))
    return votes > 0


def _parts(rvars: tuple[Var, ...], wanted: int, most: int) -> dict[Var, int]:
    """Into how many equal parts each loop is cut, so that they are about `wanted` together; none where that is impossible. A whole loop of up to
    `most` steps is best, as of the rows of a matrix: those who need one row's values may then share a kernel with its part.
    """
    first = rvars[0].extent
    if len(rvars) > 1 and isinstance(first, int) and wanted <= 2 * first and first <= most:
        return {rvars[0]: first}
    sizes = [r.extent for r in rvars if isinstance(r.extent, int)]
    if len(sizes) < len(rvars):
        return {}
    for r, n in zip(rvars, sizes, strict=True):
        if (near := _divisor(n, wanted)) * 4 > wanted and near > 1:
            return {r: near}
    cuts: dict[Var, int] = {}
    left = wanted
    for r, n in zip(rvars, sizes, strict=True):
        near = _divisor(n, left)
        if near > 1 and near * 4 > min(left, n):
            cuts[r] = near
            left //= near
    return cuts


def _divisor(n: int, most: int) -> int:
    """The largest divisor of `n` that is at most `most`."""
    return next((d for d in range(min(most, n), 1, -1) if n % d == 0), 1)


__all__ = ["costly_reductions", "partial_reductions", "read_again"]
