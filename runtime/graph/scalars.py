"""Numbers that a graph for a GPU holds as tensors of one element on the CPU: constants of the program, and what is computed of them alone.

Traces under `vmap` have them where the program says a number. Read by a kernel they are numbers again, and a graph without tensors of
another device can be recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..dispatch.operators.effects import must_run
from ..torch_compat import OpOverload, no_modes
from .predicates import fake_mode_of, same_type


def give_numbers(gm: fx.GraphModule, device: str) -> list[str]:
    """Put the number in the place of such a constant wherever a call takes it beside tensors on `device`, and gives the same dtype, sizes and strides
    with it. The names of these calls.
    """
    known: dict[fx.Node, torch.Tensor] = {}
    changed = []
    for node in gm.graph.nodes:
        if (value := _value(gm, node, known, device)) is not None:
            known[node] = value
        elif (
            node.op == "call_function" and any(n in known for n in node.all_input_nodes) and _with_numbers(node, known)
        ):
            changed.append(node.name)
    for node in reversed(known):
        if not node.users:
            gm.graph.erase_node(node)
    return changed


def _value(gm: fx.GraphModule, node: fx.Node, known: dict[fx.Node, torch.Tensor], device: str) -> torch.Tensor | None:
    """The tensor that a node always is, if it has one element, no dimensions and lies on another device."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.ndim or val.device.type in (device, "meta") or val.requires_grad:
        return None
    if node.op == "get_attr":
        found: Any = gm
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return found if type(found) is torch.Tensor else None
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or must_run(node.target):
        return None
    if not all(n in known for n in node.all_input_nodes) or node.target._schema.is_mutable:
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    with no_modes(), torch.no_grad():
        result = node.target(*args, **kwargs)
    return result if type(result) is torch.Tensor and result.dtype == val.dtype else None


def _with_numbers(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> bool:
    """Give a call the numbers, if it takes them."""
    if (
        not isinstance(node.target, OpOverload)
        or must_run(node.target)
        or not isinstance(node.meta.get("val"), torch.Tensor)
    ):
        return False
    kinds = [str(a.type) for a in node.target._schema.arguments]
    numbers = [
        known[a].item() if isinstance(a, fx.Node) and a in known and kind == "Tensor" else a
        for a, kind in zip(node.args, kinds, strict=False)
    ]
    given, kwargs = fx.map_arg((tuple(numbers), node.kwargs), lambda n: n.meta["val"])
    old = node.meta["val"]
    try:
        with fake_mode_of(node), torch.no_grad():
            new = node.target(*given, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError):
        return False  # an operator that takes no number there
    if not isinstance(new, torch.Tensor) or not same_type(new, old):
        return False
    node.args = tuple(numbers)
    return True


__all__ = ["give_numbers"]
