"""What the graph returns: the wrapper's results and new contents of inputs, and sizes that only the graph knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ....errors import UnsupportedError
from ....generated.dispatch_tables import ROLES
from ....generated.schemas import Place
from ...torch_compat import python_source
from ..record.recorder import Recorder
from ..storage.inputs import Inputs
from ..storage.regions import Layout, Value


@dataclass
class GraphOutputs:
    """`nodes` (or numbers) in order; with each the traced tensor whose gradient is its own, None where autograd does not follow it.
    `symbols`: the source from which the wrapper reads each size symbol.
    """

    inputs: Inputs
    recorder: Recorder
    nodes: list[Any] = field(default_factory=list)
    tensors: list[torch.Tensor | None] = field(default_factory=list)
    symbols: dict[str, str] = field(default_factory=dict)

    def add(self, node: Any, tensor: torch.Tensor | None = None) -> int:
        self.nodes.append(node)
        self.tensors.append(tensor if tensor is not None and self.is_followed(tensor) else None)
        return len(self.nodes) - 1

    def owned(self, value: Value) -> fx.Node:
        """The node of a fresh output. Constants of the program are copied, so that a caller cannot write to them; strides of
        dimensions of size one, about which writes do not care, become eager's.
        """
        recorder = self.recorder
        node = recorder.current(value)
        if value.region.constant and value.region.version == 0:
            node = recorder.dispatch_node(ROLES["clone"], (node,))
        if Layout.of(node.meta["val"]).strides_key() != value.layout.strides_key():
            node = recorder.dispatch_node(ROLES["as_strided"], (node, value.layout.size, value.layout.stride))
        return node

    def is_followed(self, t: torch.Tensor) -> bool:
        """Whether autograd knows how `t` was computed, or that it is an input's leaf: not so for a view that was made under `no_grad`,
        although it says that it requires grad because its base does.
        """
        if not t.requires_grad:
            return False
        if t.grad_fn is not None or any(t is known for known in self.inputs.fakes):
            return True
        if t._is_view():
            return False
        raise UnsupportedError("an output is a leaf that the program itself made (requires_grad_()); make it outside")

    def place(self, layout: Layout, origin: Layout) -> Place:
        """`layout` counted from the first element of `origin`, which may have another dtype."""
        offset = layout.offset - origin.offset
        if layout.dtype.itemsize != origin.dtype.itemsize:
            first = origin.offset * origin.dtype.itemsize
            if layout.plain and origin.plain and first % layout.dtype.itemsize:
                raise UnsupportedError(
                    f"an output views {origin.dtype} elements as {layout.dtype} at an offset between elements"
                )
            offset = layout.offset - first // layout.dtype.itemsize
        size = tuple(self.number(n) for n in layout.size)
        stride = tuple(self.number(n) for n in layout.stride)
        return Place(str(layout.dtype), size, stride, self.number(offset))

    def number(self, n: Any) -> int | str:
        """A size as it is written in the wrapper; its symbols are read from inputs, or returned by the graph."""
        if not isinstance(n, torch.SymInt):
            return int(n)
        expr = n.node.expr
        if expr.is_Integer:
            return int(expr)
        for symbol in sorted(expr.free_symbols, key=str):
            self._read_symbol(symbol)
        return python_source(expr)

    def _read_symbol(self, symbol: Any) -> None:
        if str(symbol) in self.symbols:
            return
        source = self.recorder.symbols.read_from_input(symbol)
        self.symbols[str(symbol)] = source or f"{{out{self.add(self.recorder.symbols.of_symbol(symbol))}}}"
