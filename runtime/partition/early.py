"""Gradients that the forward computes already, of a loss: a gradient is the loss's own gradient times what the forward can know.

Where the backward would need as many bytes of the forward as its gradients have (the softmax of all logits, say), the gradients themselves are
kept instead. The backward multiplies them by the loss's gradient, in their own memory where nobody else uses it, and does nothing where that
is 1, as it is for `loss.backward()`. So the largest tensors are read and written once less, and exist once instead of twice.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import fx

from ...generated import linear
from ...generated.dispatch_tables import ROLES
from ..config import Config
from .classes import OpClass, class_of
from .facts import bytes_of
from .partition import Partition

LEAST = 1 << 20
"""Bytes of gradients below which nothing is gained."""

# In float16 a gradient may be too small for its dtype before it is multiplied by a large factor (loss scaling), and not after.
_WIDE = (torch.float32, torch.float64)
_ROUNDED = (*_WIDE, torch.bfloat16)
_CHEAP = (
    OpClass.CONSTANT,
    OpClass.SYMBOL,
    OpClass.PART,
    OpClass.VIEW,
    OpClass.POINTWISE,
    OpClass.REDUCTION,
)


def gains_early(joint: fx.GraphModule, parts: Partition, cfg: Config) -> bool:
    """Whether the gradients of a joint graph had better be computed in its forward than as in `parts`, sizes by their hints."""
    if not cfg.early_gradients or cfg.cudagraphs or cfg.partition != "min_cut" or cfg.activation_memory_budget < 1:
        return False
    tangents = [n for n in joint.graph.nodes if n.meta.get("tangent")]
    gradients = _gradients(joint)
    if parts.saved_bytes < LEAST or len(tangents) != 1 or not all(isinstance(g, fx.Node) for g in gradients):
        return False
    (tangent,) = tangents
    later = _depends_on(joint, tangent)
    own = all(g in later and class_of(g) in (OpClass.POINTWISE, OpClass.REDUCTION) for g in gradients)
    if not own or len(set(gradients)) < len(gradients) or not all(map(_may_be_scaled, (tangent, *gradients))):
        return False
    # What draws random numbers, has an effect or takes long stays in the backward, which may never run.
    if tangent.meta["val"].dim() or any(class_of(n) not in _CHEAP or "region" in n.meta for n in later):
        return False
    if not LEAST <= sum(bytes_of(g.meta["val"]) for g in gradients) <= parts.saved_bytes:
        return False
    multiples = _multiples_of(joint, tangent)
    return all(g in multiples for g in gradients)


def _gradients(joint: fx.GraphModule) -> list[Any]:
    (output,) = (n for n in joint.graph.nodes if n.op == "output")
    return list(output.args[0][1])


def _depends_on(joint: fx.GraphModule, start: fx.Node) -> set[fx.Node]:
    found = {start}
    for n in joint.graph.nodes:
        if n.op != "output" and any(a in found for a in n.all_input_nodes):
            found.add(n)
    return found - {start}


def _multiples_of(joint: fx.GraphModule, start: fx.Node) -> set[fx.Node]:
    """Nodes that are a number times what they were where `start` is. A backward can have others: of a hook or an autograd function that clips,
    say, or that adds noise.
    """
    found, reached = {start}, _depends_on(joint, start)
    for n in joint.graph.nodes:
        if n in reached and _is_multiple(n, found, reached | {start}):
            found.add(n)
    return found


def _is_multiple(node: fx.Node, multiples: Set[fx.Node], reached: Set[fx.Node]) -> bool:
    used = [a for a in node.all_input_nodes if a in reached]
    first = node.args[0] if node.args else None
    only_first = used == [first] and first not in node.args[1:]
    if not all(a in multiples for a in used):
        return False
    if class_of(node) is OpClass.PART:
        return True
    if not _are_wide(node.meta["val"]):
        return False
    if class_of(node) is OpClass.VIEW:
        return only_first and node.meta["val"].dtype == first.meta["val"].dtype  # type: ignore[union-attr]
    name = str(node.target)
    if name in linear.FIRST:
        return only_first
    if name in linear.PRODUCT:
        return len(used) == 1 and sum(a is used[0] for a in node.args) == 1
    return name in linear.SUM and all(a in multiples or _is_zero(a) or _is_mask(a) for a in node.args)


def _are_wide(value: Any) -> bool:
    """Whether nothing of a value is in a dtype in which it may be too small before it is multiplied by a large factor, and not after."""
    return all(
        not isinstance(v, torch.Tensor) or v.dtype in _ROUNDED
        for v in (value if isinstance(value, (tuple, list)) else [value])
    )


def _is_zero(argument: Any) -> bool:
    if not isinstance(argument, fx.Node):
        return isinstance(argument, (int, float)) and argument == 0
    return argument.target is ROLES["zeros"] and bool(argument.args[1] == 0)


def _is_mask(argument: Any) -> bool:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _may_be_scaled(node: fx.Node) -> bool:
    """Whether a number may be multiplied once more without losing what eager keeps: in bfloat16 one that was not rounded only in the end."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return value.dtype in (_WIDE if node.target is ROLES["cast"] else _ROUNDED)


def with_early_gradients(joint: fx.GraphModule) -> fx.GraphModule:
    """A joint graph that gains by it, with gradients for a tangent of 1 in its forward half, which are kept; those
    of the backward half are these, times the tangent. (Where the loss's own gradient is not
    finite, the program's is not either, but not in the same elements: eager knows some to be 0 before it multiplies.)
    """
    graph = fx.Graph(tracer_cls=joint.graph._tracer_cls)
    made: dict[fx.Node, fx.Node] = {}
    one: fx.Node | None = None
    (tangent,) = (n for n in joint.graph.nodes if n.meta.get("tangent"))
    gradients = _gradients(joint)
    for node in joint.graph.nodes:
        if node.op == "output":
            break
        made[node] = graph.node_copy(node, lambda n: made[n])
        made[node].meta = dict(node.meta)
        if node is tangent:
            given = made[node]
            value = node.meta["val"]
            one = graph.call_function(ROLES["zeros"], ([], 1.0), {"dtype": value.dtype, "device": value.device})
            one.meta["val"] = torch.ones_like(value)
            made[node] = one
        elif one is not None:
            made[node].meta.pop("backward", None)
    late = []
    for node in gradients:
        early = made[node]
        early.meta["must_save"] = True
        times = _call(graph, ROLES["multiply"], early, given)
        late.append(_call(graph, ROLES["choose"], _call(graph, ROLES["equal"], given, 1), early, times))
    results = next(n for n in joint.graph.nodes if n.op == "output").args[0][0]
    graph.output((tuple(made[r] if isinstance(r, fx.Node) else r for r in results), tuple(late)))
    return fx.GraphModule(joint, graph)


def _call(graph: fx.Graph, op: Callable[..., Any], *args: Any) -> fx.Node:
    node = graph.call_function(op, args)
    node.meta = {"val": op(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args)), "backward": True}
    return node


def kept_as_gradients(backward: fx.GraphModule) -> dict[int, int]:
    """Positions of the placeholders of a backward that are its gradients for a tangent of 1 → of these; {} where one is not kept."""
    places = {n: k for k, n in enumerate(n for n in backward.graph.nodes if n.op == "placeholder")}
    found = [places.get(g.args[1]) for g in _returned(backward)]
    return {} if None in found else {k: gradient for gradient, k in enumerate(found) if k is not None}


def written_over(parts: Partition) -> dict[int, int]:
    """Positions of large tensors that are saved for the backward alone → of a gradient of the same layout, which may take its memory. Beside
    library calls, which may raise or have memory of their own, a gradient would be copied there, and nothing is gained.
    """
    if any(n.op == "call_function" and class_of(n) not in _CHEAP for n in parts.backward.graph.nodes):
        return {}
    placeholders = [n for n in parts.backward.graph.nodes if n.op == "placeholder"]
    gradients = _returned(parts.backward)
    free = {
        k: g
        for k, g in enumerate(gradients)
        if isinstance(g, fx.Node) and g.op == "call_function" and gradients.count(g) == 1
    }
    found: dict[int, int] = {}
    for k, (source, (what, _)) in enumerate(zip(placeholders, parts.origins, strict=False)):
        match = next(
            (n for n, g in free.items() if what == "saved" and _alike(source.meta["val"], g.meta["val"])), None
        )
        if match is not None:
            found[k] = match
            del free[match]
    return found


def _returned(backward: fx.GraphModule) -> list[Any]:
    (output,) = (n for n in backward.graph.nodes if n.op == "output")
    return list(output.args[0])


def _alike(saved: Any, gradient: Any) -> bool:
    if not (isinstance(saved, torch.Tensor) and isinstance(gradient, torch.Tensor)) or bytes_of(saved) < LEAST:
        return False
    return (saved.dtype, saved.device, saved.layout, saved.shape) == (
        gradient.dtype, gradient.device, gradient.layout, gradient.shape
    ) and saved.stride() == gradient.stride()  # fmt: skip
