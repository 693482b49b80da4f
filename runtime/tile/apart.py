"""Which values are stored by operations of their own.

Triton converts a block from the layout that it is computed in to the layout that it is stored in, right before the store, and then takes that
converted block for the value wherever else a conversion needs it, also above the store: "operand #0 does not dominate this use", and the kernel
does not compile (Triton 3.6). A block that nothing else reads is not taken for anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ..ir.nodes import Node, walk_all
from ..kernels.plan import Reduce, Statement
from .scratch import roots


def read_elsewhere(statements: Sequence[Statement]) -> Callable[[Statement], bool]:
    """For each statement of a kernel: whether other operations read the value that it stores, or load it from where it is stored."""
    tops = Counter(root for st in statements for root in roots(st))
    inside: set[Node] = set()
    loaded: set[str] = set()
    for n in walk_all(tops):
        inside.update(n.children())
        if n.op == "load":
            loaded.add(n.attr.buffer)

    def found(st: Statement) -> bool:
        if isinstance(st, Reduce):
            return False
        return tops[st.value] > 1 or st.value in inside or st.buffer in loaded

    return found


__all__ = ["read_elsewhere"]
