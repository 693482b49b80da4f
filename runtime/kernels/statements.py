"""The scalar expressions of a kernel's statements."""

from __future__ import annotations

from ..ir.guards import checks
from ..ir.nodes import Node, index_node
from .plan import Kernel, Reduce, Statement, Store


def statement_nodes(st: Statement) -> list[Node]:
    """Every scalar expression of a statement, with those inside its store index."""
    nodes = [st.value]
    if isinstance(st, Store):
        nodes += [st.mask] if st.mask is not None else []
    if not isinstance(st, Reduce):
        nodes += [index_node(e) for e in st.index if not e.is_const and e.var is None]
    return nodes


def kernel_checks(kernel: Kernel) -> dict[tuple[str, str], int]:
    """The number, from 1, that a kernel returns for each error it can report, by exception type and source line."""
    return checks(n for p in kernel.phases for st in p.body for n in statement_nodes(st))
