"""The order of a kernel's outer loops as memory has it: neighbouring points of the last loop are neighbours in memory.

A nest has its loops in the order of its dimensions; a channels-last tensor has another one in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..ir.index import Var, product
from ..ir.nodes import ITEMSIZE, Buffer
from ..kernels.plan import Kernel, Reduce
from ..kernels.statements import statement_nodes
from ..kernels.steps import flat_index

_EVERYWHERE = 1 << 62  # more than any distance in memory


def reorder_loops(kernel: Kernel, layouts: Mapping[str, Buffer]) -> Kernel:
    """The kernel with its outer loops in the order that most of what it reads and writes has in memory; those that run one point after
    another (`serial`, `grid_loop`) stay as they are, and so do loops whose steps in memory are symbolic.
    """
    if kernel.serial or kernel.grid_loop or len(kernel.outer) < 2:
        return kernel
    votes: Counter[tuple[Var, ...]] = Counter()
    for steps, weight in _accesses(kernel, layouts):
        # Where a buffer has no step along a loop, that loop's points are the same to it: the loop may be anywhere, and stays outside.
        far = {v: step or _EVERYWHERE for v, step in steps.items()}
        votes[tuple(sorted(kernel.outer, key=far.__getitem__, reverse=True))] += weight
    if not votes:
        return kernel
    order, weight = votes.most_common(1)[0]
    return replace(kernel, outer=order) if weight > votes[kernel.outer] else kernel


def _accesses(kernel: Kernel, layouts: Mapping[str, Buffer]) -> Iterator[tuple[dict[Var, int], int]]:
    """Of each buffer that is read or written: the steps in memory along the outer loops, and its bytes."""
    seen = set()
    for phase in kernel.phases:
        for st in phase.body:
            found = [(ld.attr.buffer, ld.attr.index) for n in statement_nodes(st) for ld in n.loads()]
            if not isinstance(st, Reduce):
                found.append((st.buffer, st.index))
            for name, index in found:
                if name in seen or name not in layouts:
                    continue
                seen.add(name)
                size = product(layouts[name].shape)
                place = flat_index(index, layouts[name])
                steps = [place.coefficient(v) for v in kernel.outer]
                if isinstance(size, int) and any(steps) and all(c is not None and c.is_const for c in steps):
                    known = {v: abs(int(c)) for v, c in zip(kernel.outer, steps, strict=True) if c is not None}
                    yield known, size * ITEMSIZE[layouts[name].dtype]


__all__ = ["reorder_loops"]
