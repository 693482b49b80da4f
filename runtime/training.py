"""A joint graph as two graphs to compile, and what their autograd function has to know."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from .dispatch.trace import Traced
from .execute.autograd_function import Halves, tangent_strides
from .partition import partition


@dataclass(frozen=True)
class Split:
    """The forward returns results, then what is saved; the backward takes what is saved, then tangents."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    halves: Halves


def split(traced: Traced) -> Split:
    """Partition the joint graph of a training program. What the backward needs of the forward's arguments and results is not returned a
    second time.
    """
    gradients = traced.gradients
    assert gradients is not None
    placeholders = [n for n in traced.graph.graph.nodes if n.op == "placeholder"]
    tangents = [n.meta["val"] for n in placeholders if n.meta.get("tangent")]
    arguments = len(placeholders) - len(tangents)
    results = traced.meta.num_outputs
    parts = partition(traced.graph, arguments, results, never_saved_raw={*gradients.overwritten, *gradients.unkept})
    (output,) = (n for n in parts.forward.graph.nodes if n.op == "output")
    returned = list(output.args[0])
    kept, saved = returned[:results], list[tuple[str, int]]()
    for node, (what, k) in zip(returned[results:], parts.origins, strict=True):
        if what == "saved":
            k = len(kept)
            kept.append(node)
        saved.append(("input" if what == "primal" else "output", k))
    output.args = (tuple(kept),)
    parts.forward.recompile()
    constant = tuple(
        k
        for k, n in enumerate(kept[:results])
        if k not in gradients.tangents and isinstance(n, fx.Node) and isinstance(n.meta["val"], torch.Tensor)
    )
    halves = Halves(
        arguments,
        results,
        constant,
        tuple(saved),
        tuple(isinstance(n.meta["val"], torch.Tensor) for n in returned[results:]),
        tuple(tangent_strides(t) for t in tangents),
        gradients,
    )
    return Split(parts.forward, parts.backward, halves)
