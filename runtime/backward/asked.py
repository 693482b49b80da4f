"""Which gradients a backward is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..torch_compat import is_asked_for


def left_out(ctx: Any, weights: Sequence[int], others: Sequence[int]) -> int:
    """1 where no gradient at `weights` is asked for, 2 where none at `others` is, else 0; both are positions among the edges of autograd's node."""
    nodes = ctx.next_functions
    for which, edges in (1, weights), (2, others):
        if not any(is_asked_for(nodes[k][0]) for k in edges):
            return which
    return 0
