"""Keeps what `explain` shows: every graph that is compiled while it watches, and the arguments of each graph's first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..runtime.dispatch.record.source import source_of
from ..runtime.lower.origins import origin_of
from ..runtime.observe.calls import Half

__all__ = ["KEPT_BYTES", "NOT_CALLED", "Call", "Collector"]

#: Of arguments that are copied for a measured call, all graphs together; a graph beyond that is not measured.
KEPT_BYTES = 8 << 30

NOT_CALLED = "the graph was not called"


@dataclass
class Call:
    """One compiled functional graph, and how to call it again.

    lines   where each operator of the graph comes from: by the origin that kernels show, and by its code alone, the lines of the program.
    given   the arguments of its first call, copies of those that may change; None where it was not called, or may not be called again.
    why     why there are none.
    """

    half: Half
    lines: dict[str, list[str]] = field(default_factory=dict)
    given: list[Any] | None = None
    why: str = NOT_CALLED


class Collector:
    """The observer of one explained run."""

    def __init__(self, measure: bool = True) -> None:
        self.measure = measure
        self.graphs: list[Any] = []
        self.calls: list[Call] = []
        self.bytes = 0

    def finished(self, artifacts: Any) -> None:
        self.graphs.append(artifacts)

    def compiled(self, half: Half, run: Callable[..., Any]) -> Callable[..., Any]:
        call = Call(half, _lines(half.graph))
        self.calls.append(call)
        if not self.measure:
            call.why = "nothing was to be measured"
            return run
        waiting = [True]

        def first(*args: Any) -> Any:
            if waiting and waiting.pop():
                self._keep(call, args[0] if half.boxed else args)
            return run(*args)

        return first

    def _keep(self, call: Call, args: Sequence[Any]) -> None:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if any(type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout != torch.strided for t in tensors):
            call.why = "an argument is no ordinary tensor"
            return
        # Parameters stay: only an optimizer writes to them, and nobody minds a measurement with later weights.
        size = sum(_nbytes(t) for t in tensors if not isinstance(t, torch.nn.Parameter))
        if self.bytes + size > KEPT_BYTES:
            call.why = f"its arguments take more than {KEPT_BYTES >> 30} GiB"
            return
        self.bytes += size
        call.given = [_kept(a) for a in args]
        call.why = ""


def _nbytes(t: torch.Tensor) -> int:
    return t.untyped_storage().nbytes() if 0 in t.stride() else t.numel() * t.element_size()


def _kept(a: Any) -> Any:
    if not isinstance(a, torch.Tensor) or isinstance(a, torch.nn.Parameter):
        return a
    return copied(a)


def copied(t: torch.Tensor) -> torch.Tensor:
    """A tensor in memory of its own, with the same sizes and strides."""
    with torch.no_grad():
        whole = t.detach()
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else -1
        memory = torch.empty(last + 1, dtype=t.dtype, device=t.device)
        memory.copy_(whole.as_strided((last + 1,), (1,), t.storage_offset()))
        return memory.as_strided(t.shape, t.stride())


def _lines(graph: torch.fx.GraphModule) -> dict[str, list[str]]:
    found: dict[str, dict[str, None]] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function" or not (line := source_of(node)):
            continue
        name = str(node.target)
        origin = origin_of(name if "." in name else f"control.{name}", node)
        # What runs a branch or a loop has a name of its own: its line of code tells.
        for key in (origin, origin.partition(": ")[2]):
            found.setdefault(key, {})[line] = None
    return {origin: list(lines) for origin, lines in found.items()}
