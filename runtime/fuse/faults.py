"""Checks of positions that substitution must not lose: a value is only substituted where all that is checked in it is still computed."""

from __future__ import annotations

from ..ir.facts import covers
from ..ir.fold import fold
from ..ir.guards import checks
from ..ir.index import Atom, Expr, Val, Var, expr, of, proves_less, proves_nonnegative
from ..ir.nodes import Extern, Nest, Node, Size, rebuild
from ..ir.work import is_pointwise


def checked_where_constant(items: list[Nest | Extern]) -> set[str]:
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


def may_fault(body: Node, memo: dict[Node, bool]) -> bool:
    """Whether a position is checked in `body`. `memo`: what is known of the bodies it was made from."""
    for n in body.walk(memo.__contains__):
        memo[n] = n.op == "bounded" or any(memo[c] for c in n.children())
    return memo[body]


def visits_all(consumer: Nest, nest: Nest) -> bool:
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
    mask = fold(rebuild(ld.args[0], lambda _: None, steps))
    return mask.op == "const" and bool(mask.attr)
