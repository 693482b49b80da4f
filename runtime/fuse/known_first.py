"""The order in which nests are put into groups: totals that depend on inputs alone come before the rows that need them.

An example is the number of targets that count in a loss. If it is known first, the gradient of each row is computed together with the row's softmax;
otherwise all rows go through memory a second time.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from ..ir.nodes import Extern, Nest
from ..ir.work import is_pointwise, points_of

_PART = 64  # a total goes through so many times fewer points than the largest loops


def known_first(items: Sequence[Nest | Extern], inputs: Container[str]) -> list[Nest | Extern]:
    """The items, with such totals, and what they are computed from, in front."""
    place = {it.name: k for k, it in enumerate(items) if isinstance(it, Nest)}
    points = {it.name: n for it in items if isinstance(it, Nest) and isinstance(n := points_of(it), int)}
    few = max(points.values(), default=0) // _PART
    known: dict[str, Nest] = {}  # values that depend on inputs alone, of few elements
    for it in items:
        if not isinstance(it, Nest) or it.scatter is not None or points.get(it.name, few + 1) > few:
            continue
        if all(n in inputs or n in known for n in it.reads()):
            known[it.name] = it
    front: set[str] = set()
    for it in items:
        if not isinstance(it, Nest) or not is_pointwise(it) or known.keys() >= {*it.reads()}:
            continue
        for total in (known[name] for name in it.reads() if name in known):
            first = min((place[n] for n in it.reads() if n in place and n not in known), default=place[total.name])
            if total.reduce is not None and not total.loop_vars and first < place[total.name]:
                front |= _made_of(total, known)
    return sorted(items, key=lambda it: not (isinstance(it, Nest) and it.name in front)) if front else list(items)


def _made_of(total: Nest, known: Mapping[str, Nest]) -> set[str]:
    found, left = {total.name}, [total]
    while left:
        new = {n for n in left.pop().reads() if n in known} - found
        found |= new
        left += [known[n] for n in new]
    return found
