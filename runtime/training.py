"""A joint graph as two graphs to compile, and what their autograd function has to know."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ..errors import ConfigError
from .config import Config, current
from .dispatch.trace import Traced
from .execute.autograd_function import Halves, tangent_strides
from .partition import partition


@dataclass(frozen=True)
class Split:
    """The forward returns results, then what is saved; the backward takes what is saved, then tangents."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    halves: Halves


def split(traced: Traced, cfg: Config | None = None) -> Split:
    """Partition the joint graph of a training program as `cfg` says. What the backward needs of the forward's arguments and results is not
    returned a second time. Raises `ConfigError` for a memory budget above 1.
    """
    cfg = cfg or current()
    if cfg.activation_memory_budget > 1:
        raise ConfigError(f"activation_memory_budget lies between 0 and 1, not {cfg.activation_memory_budget!r}")
    gradients = traced.gradients
    assert gradients is not None
    placeholders = [n for n in traced.graph.graph.nodes if n.op == "placeholder"]
    tangents = [n.meta["val"] for n in placeholders if n.meta.get("tangent")]
    arguments = len(placeholders) - len(tangents)
    results = traced.meta.num_outputs
    parts = partition(
        traced.graph,
        arguments,
        results,
        policy=cfg.partition,  # type: ignore[arg-type]  # its choices are the policies
        budget=cfg.activation_memory_budget,
        never_saved_raw={*gradients.overwritten, *gradients.unkept},
    )
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
    inside = {k for r in gradients.wrapped_results for k in r.dense}
    constant = tuple(
        k
        for k, n in enumerate(kept[:results])
        if k not in gradients.tangents and k not in inside and isinstance(n, fx.Node) and isinstance(n.meta["val"], torch.Tensor)
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
