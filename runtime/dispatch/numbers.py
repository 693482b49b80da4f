"""Python numbers of the program that change from call to call: Dynamo passes each as a tensor and reads it in the graph, a symbolic float.

Lowerings take such a number where its value decides nothing (`lower/number.py`). Where it does, or no code takes it, Dynamo is asked to look at
the program again with the number as a constant, and guards on it: each value is compiled, as it is with the peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import UnsupportedError
from ..torch_compat import number_read_from, start_anew


def changing_numbers(gm: Any) -> dict[str, torch.SymFloat]:
    """Such numbers of a graph of Dynamo's, by the names of their symbols."""
    found: dict[str, torch.SymFloat] = {}
    for node in gm.graph.nodes if isinstance(gm, torch.fx.GraphModule) else ():
        if node.op == "placeholder" and (number := number_read_from(node.meta.get("example_value"))) is not None:
            found[number.node._expr.name] = number
    return found


@contextmanager
def constants_where_needed(gm: Any) -> Iterator[Callable[[], None]]:
    """Compile in the block; raise what makes Dynamo start anew where that cannot be done, or where tracing has found out the value of a number that
    changes: the block calls what it is given once it has traced.
    """
    numbers = changing_numbers(gm)
    symbols = {name: number.node.expr.free_symbols for name, number in numbers.items()}
    before = {id(guard) for number in numbers.values() for guard in number.node.shape_env.guards}

    def settle() -> None:
        guards = [g for number in numbers.values() for g in number.node.shape_env.guards if id(g) not in before]
        start_anew(name for name, of in symbols.items() if not of or any(of & g.expr.free_symbols for g in guards))

    try:
        yield settle
    except UnsupportedError:
        start_anew(numbers)
        raise
    finally:
        settle()


__all__ = ["changing_numbers", "constants_where_needed"]
