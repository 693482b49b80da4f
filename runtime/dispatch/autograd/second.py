"""Gradients of a program's gradients: the trace of a training program, in which autograd runs backward a second time, over what it ran first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from ....errors import UnsupportedError
from ...torch_compat import own_grad
from ..record.dead import finish
from ..symbols.kernels import of_gradients
from .joint import Differentiated, tangent_placeholders

Twice = Callable[[Mapping[Any, Any], Collection[int], Collection[int]], "SecondOrder"]
"""Traces a program once more, with numbers for its symbols of sizes, without the gradients at positions that nobody asks for, and from the tangents
but for those at positions that are undefined.
"""


@dataclass(frozen=True)
class SecondOrder:
    """A program, its backward, and the backward of that, as one functional graph. It takes the graph inputs, the tangents of results, and gradients
    of the gradients; it returns (gradients, second gradients), in the order of `Gradients.inputs`, and in that order with a gradient for each tangent
    behind them.

    graph     it may be rewritten.
    tangents  placeholders of the tangents, in the order of `Gradients.tangents`.
    given     for each gradient the placeholder of its own gradient; None where it does not move with an input or a tangent.
    """

    graph: fx.GraphModule
    tangents: tuple[fx.Node, ...]
    given: tuple[fx.Node | None, ...]

    @property
    def gradients(self) -> tuple[fx.Node | None, ...]:
        """The nodes of the gradients."""
        return self._returned(0)

    @property
    def second(self) -> tuple[fx.Node | None, ...]:
        """Those of the gradients of gradients."""
        return self._returned(1)

    def _returned(self, k: int) -> tuple[fx.Node | None, ...]:
        (output,) = self.graph.graph.find_nodes(op="output")
        return tuple(output.args[0][k])


def differentiate_twice(program: Differentiated, left: Collection[int], absent: Collection[int]) -> SecondOrder:
    """Record the backward of a recorded program without the gradients at positions `left` and the tangents at `absent`, and the backward of that.
    Raises what autograd raises where an operator has no gradient of its gradient, `UnsupportedError` for tensor subclasses.
    """
    if program.made or program.wrappers:
        raise UnsupportedError("tensor subclasses are among the inputs or results")
    recorder = program.recorder
    _, tangents = program.tangents()
    for t in tangents:
        t.requires_grad_()
    recorder.origin, recorder.backward = None, True
    gradients = program.gradients(tangents, create_graph=True, left=left, absent=absent)
    moving = [g for g in gradients if g is not None and g.requires_grad]
    given = tangent_placeholders(recorder, moving, program.inputs.fake_mode, "second")
    edges = [e for _, e in program.wanted] + [get_gradient_edge(t) for t in tangents]
    found: Sequence[torch.Tensor | None] = [None] * len(edges)
    if moving:
        with recorder, of_gradients(program.inputs.fake_mode.shape_env), torch.autograd.set_detect_anomaly(False):
            found = own_grad(moving, edges, given, allow_unused=True)

    def nodes(tensors: Sequence[torch.Tensor | None]) -> tuple[fx.Node | None, ...]:
        return tuple(None if t is None else recorder.current(recorder.value(t)) for t in tensors)

    places = iter(nodes(given))
    own = tuple(next(places) if g is not None and g.requires_grad else None for g in gradients)
    graph = finish(recorder, (nodes(gradients), nodes(found)))
    return SecondOrder(graph, nodes(tangents), own)  # type: ignore[arg-type]
