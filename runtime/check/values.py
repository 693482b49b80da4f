"""What a plan computes, compared with what the program says: both sides are expanded only as far as they differ.

Program and kernels are read as one table of definitions. A register or a scratch tile is a definition over all loop variables of its
kernel (its loads get the outer coordinates as well); a program's nest is a definition over its coordinates. Two loads of one buffer at
equal coordinates are equal; else the one that is defined later is replaced by its definition. Results of comparisons are remembered, so the
work is about as large as the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..ir.facts import equal, in_range
from ..ir.index import Atom, Expr, Val, Var, bounds, expr, of
from ..ir.nodes import Extern, Nest, Node, Program, const, index_node, indirect, rebuild
from ..ir.ranges import value_range
from .conditions import (
    AND,
    COMPARE,
    NOT,
    OR,
    Assumed,
    conjuncts,
    coordinate,
    decide,
    extremes,
    narrowed,
    opposite,
    reduced,
    shrunk,
    slid,
    truth,
)
from .loops import loop_matches

_POSITIONS = ("argmax", "argmin")


@dataclass(frozen=True)
class Definition:
    """The value of a buffer at `coords` (free variables of `body`, one for each dimension; 0 for a dimension of size 1).

    kind   "plain", "reduce" (by `how`, over `loops`), "scan" (by `how`, along variable `loops[0]`) or "opaque" (nothing to expand).
    order  definitions refer only to lower ones.
    """

    kind: str
    order: int
    coords: tuple[Expr, ...] = ()
    body: Node | None = None
    how: str = ""
    loops: tuple[Var, ...] = ()
    dtype: str = ""


class Values:
    """The definitions, and the question whether two expressions are equal."""

    def __init__(self, program: Program) -> None:
        self.table: dict[str, Definition] = {}
        self.nests: dict[str, Nest] = {}
        for b in program.inputs:
            self.table[b.name] = Definition("opaque", 0)
        for k, item in enumerate(program.items, 1):
            if isinstance(item, Extern):
                self.table.update((b.name, Definition("opaque", k)) for b in item.outs)
                continue
            self.nests[item.name] = item
            self.table[item.name] = _of_nest(item, k)
        self.last = len(program.items) + 1
        self.shared: set[tuple] = set()
        self.expanded: dict[Node, Node] = {}
        self.stored_checks: set[Node] = set()
        """Positions that kernels before have checked and stored, beside what the program defines."""
        self.meant: dict[Node, Node] = {}
        self.memos: dict[tuple, dict[Node, Node]] = {}
        self.why: tuple[Node, Node] | None = None

    def add(self, name: str, definition: Definition) -> None:
        self.table[name] = definition

    def next_order(self) -> int:
        self.last += 1
        return self.last

    # -- the question --------------------------------------------------------------------------------------------------
    def same(
        self,
        a: Node,
        b: Node,
        proved: set[tuple] | None = None,
        assume: tuple[Assumed, Assumed] = (frozenset(), frozenset()),
    ) -> bool:
        """True if `a` and `b` have the same value at every point. On False, `why` is the innermost pair that differs."""
        if proved is None:
            self.why = None
        seen: set[tuple] = set() if proved is None else proved
        added: list[tuple] = []
        todo: list[tuple[Node, Node, Assumed, Assumed]] = [(a, b, *assume)]
        while todo:
            task = todo.pop()
            if task in seen or task in self.shared:
                continue
            seen.add(task)
            added.append(task)
            more = self._step(*task, seen)
            if more is None:
                seen.difference_update(added)
                return False
            todo += more
        # Each pair rests on pairs of smaller expressions or earlier definitions only, so the pairs met are facts once all hold.
        if proved is None:
            self.shared |= seen
        return True

    def same_index(
        self,
        a: Expr,
        b: Expr,
        proved: set[tuple] | None = None,
        assume: tuple[Assumed, Assumed] = (frozenset(), frozenset()),
    ) -> bool:
        """True if two coordinates are equal (where the conditions in `assume` hold); indirect ones by comparing their values."""
        if a is b:
            return True
        if _vals(a) or _vals(b):
            less = narrowed(assume[0] | assume[1])
            a, b = (self._opened_index(e, less).subst(less) for e in (a, b))
        left, right = _vals(a), _vals(b)
        if not left and not right:
            if equal(a, b):
                return True
            inside = assume[0] | assume[1]
            less = narrowed(inside)
            if less and equal(a.subst(less), b.subst(less)):
                return True
            if inside and equal(shrunk(a, inside), shrunk(b, inside)):
                return True
            apart = slid(inside)
            if apart and equal(a.subst(apart), b.subst(apart)):
                return True
            return bool(inside) and extremes(a - b, inside) == (0, 0)
        chosen: dict[Atom, Expr] = {}
        for v in left:
            match = next(
                (
                    w
                    for w in right
                    if (w.lo, w.hi) == (v.lo, v.hi)
                    and self.same(v.node, w.node, set() if proved is None else proved, assume)
                ),
                None,
            )
            if match is None:
                return False
            chosen[v] = of(match)
        return equal(a.subst(chosen), b)

    def _opened_index(self, e: Expr, less: Mapping[Atom, Expr]) -> Expr:
        """Indirect parts that turn out to be coordinates, once plain definitions are expanded, become coordinates."""

        def opened(v: Val) -> Expr:
            at = self._coordinate_node(v.node, less)
            return of(v) if at is None or (isinstance(at.atom, Val) and at.atom.node is v.node) else at

        return e.subst({}, opened)

    def _coordinate_node(self, n: Node, less: Mapping[Atom, Expr] = MappingProxyType({})) -> Expr | None:
        """The coordinate that an integer node is after expanding plain definitions (and the wrap of negative positions), or None. `less`:
        what the loop variables are where the node counts.
        """
        n = self._plain(n)
        if n.op == "where" and len(n.args) == 3:
            test = self._plain(n.args[0])
            if test.op in COMPARE:
                left, right = (self._coordinate_node(x, less) for x in test.args)
                if left is not None and right is not None:
                    known = decide(test.op, *bounds((left - right).subst(less)))
                    if known is not None:
                        return self._coordinate_node(n.args[1] if known else n.args[2], less)
            return None
        if n.op == "bounded":
            at, size = self._coordinate_node(n.args[0], less), coordinate(n.args[1])
            if at is None and size is not None and size.is_const:
                return indirect(n, 0, int(size) - 1)  # its check keeps it there
            known = at is not None and size is not None and (in_range(at, size) or in_range(at.subst(less), size))
            return at if known else None
        at = coordinate(n)
        return None if at is None else self._opened_index(at, less)

    def _plain(self, n: Node) -> Node:
        """What is read, in the place of a load of a plain definition."""
        while n.op == "load" and (d := self._definition(n)) is not None and d.kind == "plain":
            n = reduced(self.expand(n), frozenset())
        return n

    def _within(self, n: Node) -> Node:
        """A checked position without its check, if it is never out of range."""
        size = coordinate(n.args[1]) if n.op == "bounded" else None
        if size is None or not size.is_const:
            return n
        lo, hi = value_range(self._plain(n.args[0]))
        return n.args[0] if lo is not None and hi is not None and lo >= 0 and hi < int(size) else n

    def _step(self, a: Node, b: Node, fa: Assumed, fb: Assumed, seen: set[tuple]) -> list[tuple] | None:
        """The pairs that must be equal so that `a` and `b` are; None if they cannot be shown equal."""
        if a is b and fa == fb:
            return []
        whole = a, b
        a, b = reduced(a, fa), reduced(b, fb)
        if a is b:
            return []
        # Assumptions decide the one, but not the other, whose conditions have other names: equal everywhere is equal here. (Without
        # assumptions the pair would be its own proof.)
        one_decided = (a is whole[0]) != (b is whole[1]) or (a.op == "const") != (b.op == "const")
        if (fa or fb) and one_decided and (a.op != b.op or a.op == "load") and self.same(*whole, seen):
            return []
        if a.op == "load" and b.op == "load":
            at = self._same_place(a, b, fa, fb, seen)
            if at is not None:
                return at
        da, db = self._definition(a), self._definition(b)
        can_a, can_b = (
            da is not None and (da.kind == "plain" or bool(a.args)),
            db is not None and (db.kind == "plain" or bool(b.args)),
        )
        if can_a or can_b:
            if can_a and can_b and da is not None and db is not None:
                can_a, can_b = da.order >= db.order, db.order >= da.order
            return [(self.expand(a) if can_a else a, self.expand(b) if can_b else b, fa, fb)]
        if da is not None and db is not None:
            return [] if self._same_loop(a, da, b, db, seen, fa | fb) else self._differ(a, b, keep=True)
        if a.op == "index" and b.op == "index":
            return [] if self.same_index(a.attr, b.attr, seen, (fa, fb)) else self._differ(a, b)
        if (a.op == "bounded") != (b.op == "bounded"):  # on one side it was seen that nothing is out of range
            inside = self._within(a), self._within(b)
            if inside != (a, b):
                return [(*inside, fa, fb)]
        if a.op != b.op or len(a.args) != len(b.args) or (a.op == "where" and a.args[0] is not b.args[0]):
            # One side may have lost a part that is decided only inside a definition of the other.
            if a.dtype == b.dtype == "int64":
                left, right = self._coordinate_node(a), self._coordinate_node(b)
                if left is not None and right is not None and self.same_index(left, right, seen, (fa, fb)):
                    return []
            ea, eb = self._opened(a, fa), self._opened(b, fb)
            if ea is not a or eb is not b:
                return [(ea, eb, fa, fb)]
            if a.dtype == b.dtype == "bool" and (a.op == "const") != (b.op == "const"):
                known = [truth(self._meant(x), frozenset(map(self._meant, f))) for x, f in ((a, fa), (b, fb))]
                if known[0] is not None and known[0] == known[1]:
                    return []
        if (
            a.op != b.op
            or a.dtype != b.dtype
            # Updates of several caches read one position, whose check has raised before: what it says is the first one's.
            or (a.attr != b.attr and a not in self.stored_checks)
            or len(a.args) != len(b.args)
            or a.op in ("const", "load", "index")
        ):
            return self._differ(a, b)
        if a.op == "where" and len(a.args) == 3:
            (ca, ta, ea), (cb, tb, eb) = a.args, b.args
            return [
                (ca, cb, fa, fb),
                (ta, tb, fa | conjuncts(ca), fb | conjuncts(cb)),
                (ea, eb, fa | opposite(ca, fa), fb | opposite(cb, fb)),
            ]
        if a.op == "bounded":  # where the check counts changes no value
            return [(x, y, fa, fb) for x, y in zip(a.args[:2], b.args[:2], strict=True)]
        return [(x, y, fa, fb) for x, y in zip(a.args, b.args, strict=True)]

    def _differ(self, a: Node, b: Node, keep: bool = False) -> list[tuple] | None:
        """Note the pair for the message; of two reductions, the pair inside them that differs says more."""
        if not keep or self.why is None:
            self.why = (a, b)
        return None

    def _same_place(self, a: Node, b: Node, fa: Assumed, fb: Assumed, seen: set[tuple]) -> list[tuple] | None:
        if a.attr.buffer != b.attr.buffer or len(a.args) != len(b.args) or a.dtype != b.dtype:
            return None
        # Where a load is only where its mask holds counts only there.
        inside = (fa | conjuncts(a.args[0]), fb | conjuncts(b.args[0])) if a.args else (fa, fb)
        if not all(self.same_index(x, y, seen, inside) for x, y in zip(a.attr.index, b.attr.index, strict=True)):
            return None
        return [(a.args[0], b.args[0], fa, fb)] if a.args else []

    # -- definitions ---------------------------------------------------------------------------------------------------
    def _definition(self, n: Node) -> Definition | None:
        if n.op != "load":
            return None
        found = self.table.get(n.attr.buffer)
        return None if found is None or found.kind == "opaque" else found

    def expand(self, n: Node) -> Node:
        """The load replaced by its definition; a masked one is 0 where the mask is false."""
        found = self.expanded.get(n)
        if found is not None:
            return found
        if n.args:
            plain = Node("load", (), n.dtype, n.attr)
            new = Node("where", (n.args[0], plain, const(0, n.dtype)), n.dtype)
        else:
            d = self.table[n.attr.buffer]
            assert d.body is not None
            new = rebuild(d.body, _no_change, _mapping(d.coords, n.attr.index))
        if new.op == "bounded" and n.attr.buffer not in self.nests:
            self.stored_checks.add(new)
        self.expanded[n] = new
        return new

    def _opened(self, n: Node, assumed: Assumed) -> Node:
        """A condition with what its arguments are by definition; of a choice by such a condition, or a masked load, what it decides for."""
        if n.op == "where" and len(n.args) == 3:
            known = truth(self._meant(n.args[0]), assumed)
            if known is None and assumed:
                known = truth(rebuild(n.args[0], lambda ld: reduced(ld, assumed), {}), assumed)
            return n if known is None else n.args[1] if known else n.args[2]
        if n.op == "load" and n.args:
            known = truth(self._meant(n.args[0]), assumed)
            return n if known is None else Node("load", (), n.dtype, n.attr) if known else const(0, n.dtype)
        return self._meant(n) if n.dtype == "bool" and n.op in (*AND, *OR, *NOT, *COMPARE) else n

    def _meant(self, n: Node) -> Node:
        """A condition, or an argument of one, with plain definitions, and positions that are coordinates, in the place of their names."""
        if n.dtype == "int64":
            at = self._coordinate_node(n)
            if at is not None:
                return index_node(at)
        while True:
            if (d := self._definition(n)) is not None and d.kind == "plain":
                n = reduced(self.expand(n), frozenset())
            elif (
                n.op == "where"
                and n.dtype == "bool"
                and (known := truth(self._meant(n.args[0]), frozenset())) is not None
            ):
                n = n.args[1] if known else n.args[2]
            else:
                break
        if n.dtype != "bool" or n.op not in (*AND, *OR, *NOT, *COMPARE):
            return n
        found = self.meant.get(n)
        if found is None:
            args = tuple(self._meant(x) for x in n.args)
            found = self.meant[n] = n if args == n.args else Node(n.op, args, n.dtype, n.attr)
        return found

    def _moved(self, body: Node, mapping: dict[Atom, int | Expr]) -> Node:
        """The expression over other variables. What large bodies share (the phases of one kernel) is mapped once."""
        key = tuple(
            (a.text, expr(e)) for a, e in sorted(mapping.items(), key=lambda p: p[0].text) if expr(e).atom is not a
        )
        memo = self.memos.setdefault(key, {})
        return rebuild(body, _no_change, mapping, memo)

    def _same_loop(self, a: Node, da: Definition, b: Node, db: Definition, seen: set[tuple], assumed: Assumed) -> bool:
        """Two reductions, or two scans, at two places, where the conditions in `assumed` hold."""
        if (da.kind, da.how) != (db.kind, db.how) or a.args or b.args:
            return False
        assert da.body is not None
        assert db.body is not None
        less = narrowed(assumed)
        index_a, index_b = ([e.subst(less) for e in n.attr.index] if less else n.attr.index for n in (a, b))
        at_a, at_b = _mapping(da.coords, index_a), _mapping(db.coords, index_b)
        if da.kind == "scan":
            (va,), (vb,) = da.loops, db.loops
            if expr(va.extent) != expr(vb.extent) or not self.same_index(
                expr(at_a.get(va, 0)), expr(at_b.get(vb, 0)), seen
            ):
                return False
            z = of(Var(f"~{_fresh(a, b)}", va.extent))
            at_a, at_b = {**at_a, va: z}, {**at_b, vb: z}
            return self.same(self._moved(da.body, at_a), self._moved(db.body, at_b), seen)
        if da.dtype != db.dtype:
            return False
        for ma, mb in loop_matches(da.loops, db.loops, _fresh(a, b), ordered=da.how in _POSITIONS):
            left, right = self._moved(da.body, {**at_a, **ma}), self._moved(db.body, {**at_b, **mb})
            if self.same(left, right, seen):
                return True
        return False


def _no_change(_: Node) -> None:
    return None


def _of_nest(nest: Nest, order: int) -> Definition:
    if nest.scatter is not None:
        return Definition("opaque", order)
    if nest.reduce is not None:
        return Definition("reduce", order, nest.vars, nest.body, nest.reduce, nest.rvars, nest.dtype)
    if nest.scan is not None:
        along = nest.vars[nest.scan_dim].var
        if along is not None:
            return Definition("scan", order, nest.vars, nest.body, nest.scan, (along,), nest.dtype)
    return Definition("plain", order, nest.vars, nest.body, dtype=nest.dtype)


def _mapping(coords: Sequence[Expr], index: Sequence[Expr]) -> dict[Atom, int | Expr]:
    return {c.var: i for c, i in zip(coords, index, strict=True) if c.var is not None}


def _vals(e: Expr) -> list[Val]:
    return sorted((a for a in e.atoms() if isinstance(a, Val)), key=lambda v: v.text)


def _fresh(a: Node, b: Node) -> int:
    """The first number from which on `~n` names no variable at the two places. Small numbers, so that equal loops share their expansions."""
    used = [int(v.name[1:].partition("_")[0]) for n in (a, b) for v in n.vars() if v.name.startswith("~")]
    return 1 + max(used, default=-1)
