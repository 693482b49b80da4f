"""Does a graph need autograd? Then it is traced for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...torch_compat import pytree


def wants_grad(gm: Any, example_inputs: Sequence[Any]) -> bool:
    """Whether running `gm` on inputs like these may build an autograd graph: an input, parameter or buffer of it
    requires grad, and grad mode is on, or the graph turns it on; or the graph itself asks for a gradient of
    something. In inference mode nothing does, whatever grad mode says.
    """
    if torch.is_inference_mode_enabled():
        return False
    graph = getattr(gm, "graph", None)
    turns_on = False
    if graph is not None:
        for node in graph.nodes:
            name = getattr(node.target, "__name__", node.target)
            if name == "requires_grad_" or (
                name == "setattr" and len(node.args) > 1 and node.args[1] == "requires_grad"
            ):
                return torch.is_grad_enabled()
            turns_on |= name in ("_set_grad_enabled", "set_grad_enabled") and bool(node.args) and node.args[0] is True
    if not (torch.is_grad_enabled() or turns_on):
        return False
    tensors = [t for t in pytree.tree_leaves(list(example_inputs)) if isinstance(t, torch.Tensor)]
    if isinstance(gm, torch.nn.Module):
        tensors += [*gm.parameters(), *gm.buffers()]
    return any(t.requires_grad for t in tensors)
