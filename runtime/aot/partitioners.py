"""Joint graphs as torch's partition functions take them, and the two graphs that such a function returns.

A joint module is called with `(primals, tangents)`, two lists, and returns the forward's results and one gradient for each primal, None
where there is none; its output node has them in one flat list. Its placeholders are `primals_1`, ... and `tangents_1`, .... A partition
function returns a forward `primals → (*results, *saved tensors, *saved sizes)` and a backward
`(*saved sizes, *saved tensors, *tangents) → gradients`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ...generated.dispatch_tables import ROLES
from ..backward.compiled import CompiledBackward, Tangent, constant_results, saved_values, watched_tensors
from ..config import current
from ..dispatch.autograd.joint import Gradients
from ..dispatch.operators.schema import op_info
from ..partition import partition
from ..torch_compat import OpOverload, PyTreeCodeGen, PyTreeInfo, pytree
from .compilers import describe, detached

Halved = tuple[fx.GraphModule, fx.GraphModule]


def joint_module(graph: fx.GraphModule, gradients: Sequence[int], *, unsaved: Collection[int] = ()) -> fx.GraphModule:
    """The joint graph `((*results,), (*gradients,))` of a trace in the form above; `gradients[k]` is the primal whose gradient the k-th is.
    `unsaved` (primals that are overwritten after the forward) goes to `meta["opforge_unsaved"]` for our own partition functions.
    """
    own = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    counts = {"primals": 0, "tangents": 0}
    backward = False
    for node in graph.graph.nodes:
        if node.op == "output":
            results, found = node.args[0]
            continue
        if node.op == "placeholder":
            kind = "tangents" if node.meta.get("tangent") else "primals"
            counts[kind] += 1
            made[node] = own.placeholder(f"{kind}_{counts[kind]}")
            made[node].meta = dict(node.meta)
            continue
        made[node] = own.node_copy(node, made.__getitem__)
        meta = made[node].meta
        # Sizes that only the backward takes stand in the middle of it; partition functions expect the whole forward before it.
        backward = backward or bool(node.meta.get("backward"))
        meta["partitioner_tag"] = "is_backward" if backward else "is_forward"
        if "region" in meta:  # a checkpointed region, as torch tells it
            keep = meta.get("must_save") or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            policy = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
            meta |= {"ac_graph_id": meta["region"], "recompute": policy}
    rest = _beyond(gradients, counts["primals"], len(found))
    every: list[Any] = [*([None] * counts["primals"]), *(found[k] for k in rest)]
    for k, g in zip(gradients, found, strict=False):
        if k < counts["primals"]:
            every[k] = g
    outputs = fx.node.map_arg([*results, *every], made.__getitem__)
    own.output(outputs)
    in_spec = pytree.tree_structure(tuple([0] * n for n in counts.values()))
    out_spec = pytree.tree_structure(((0,) * len(results), (0,) * len(every)))
    own.set_codegen(PyTreeCodeGen(PyTreeInfo(list(counts), in_spec, out_spec)))
    module = fx.GraphModule(graph, own, class_name="Joint")
    describe(own)
    module.meta["opforge_unsaved"] = frozenset(unsaved)
    return module


def _beyond(inputs: Sequence[int], primals: int, count: int) -> list[int]:
    """Which of `count` gradients are of no primal: those of tensor subclasses, which follow the primals' gradients."""
    return [k for k in range(count) if k >= len(inputs) or inputs[k] >= primals]


def joint_inputs(joint: fx.GraphModule) -> tuple[list[Any], list[Any]]:
    """The fake primals and tangents of a joint module."""
    nodes = [n for n in joint.graph.nodes if n.op == "placeholder"]
    primals, tangents = ([detached(n.meta["val"]) for n in nodes if _tangent(n) is t] for t in (False, True))
    return primals, tangents


def _tangent(node: fx.Node) -> bool:
    return bool(node.meta.get("tangent")) or node.name.startswith("tangents")


def default_partition(
    joint_module: fx.GraphModule, _joint_inputs: Any, *, num_fwd_outputs: int, **others: Any
) -> Halved:
    """Cut a joint module in two and keep for the backward what it reads of the forward. Further keyword arguments, which torch passes
    (`static_lifetime_input_indices`), are not needed. Raises `ValueError` for a graph of another form.
    """
    return _cut(joint_module, num_fwd_outputs, "default", 1.0)


def min_cut_rematerialization_partition(
    joint_module: fx.GraphModule,
    _joint_inputs: Any,
    compiler: str = "inductor",
    *,
    num_fwd_outputs: int,
    **others: Any,
) -> Halved:
    """Cut a joint module in two so that the fewest bytes are kept: what is cheap is computed again in the backward. The setting
    `activation_memory_budget` holds. `compiler` and further keyword arguments, which torch passes, change nothing here. Raises
    `ValueError` for a graph of another form.
    """
    return _cut(joint_module, num_fwd_outputs, "min_cut", current().activation_memory_budget)


def _cut(joint: fx.GraphModule, results: int, policy: Literal["default", "min_cut"], budget: float) -> Halved:
    """Our partition, in and out of the form above."""
    graph = fx.Graph()
    outputs = graph.graph_copy(joint.graph, {})
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    primals = sum(not _tangent(n) for n in placeholders)
    flat: Any = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
    if len(flat) == 2 and all(isinstance(part, (list, tuple)) for part in flat):
        flat = (*flat[0], *flat[1])
    if len(flat) < results + primals:
        raise ValueError(
            f"the joint graph returns {len(flat)} values; {results} results and a gradient for each of {primals} primals were expected"
        )
    _mark_regions(graph)
    _mark_backward(graph, placeholders[primals:])
    graph.output((tuple(flat[:results]), tuple(flat[results:])))
    parts = partition(
        fx.GraphModule(joint, graph),
        primals,
        results,
        policy=policy,
        budget=budget,
        never_saved_raw=joint.meta.get("opforge_unsaved", ()),
    )
    _sizes_first(parts.backward, parts.saved_tensors, parts.saved_symbols)
    return parts.forward, parts.backward


def _mark_regions(graph: fx.Graph) -> None:
    """Checkpointed regions by number, as our partition reads them."""
    for node in graph.nodes:
        policy = node.meta.get("recompute")
        if isinstance(policy, CheckpointPolicy):
            node.meta["region"] = node.meta.get("ac_graph_id", 0)
            node.meta["must_save"] = policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def _mark_backward(graph: fx.Graph, tangents: Sequence[fx.Node]) -> None:
    """Say of the nodes that need a tangent that they were made by the backward; ours say so already."""
    later = set(tangents)
    for node in graph.nodes:
        if any(n in later for n in node.all_input_nodes):
            later.add(node)
            node.meta["backward"] = True


def _sizes_first(backward: fx.GraphModule, tensors: int, sizes: int) -> None:
    placeholders = [n for n in backward.graph.nodes if n.op == "placeholder"]
    for node in reversed(placeholders[tensors : tensors + sizes]):
        placeholders[0].prepend(node)
        placeholders.remove(node)
        placeholders.insert(0, node)
    backward.recompile()


def read_backward(
    forward: Any, backward: Any, gradients: Gradients, tangents: Sequence[Any], arguments: int, results: int
) -> CompiledBackward:
    """The backward of a user's two graphs. The forward is changed where it would keep a tensor that is written
    to after it has run: it returns a copy. Raises TypeError for something else than two graph modules, ValueError for graphs whose
    inputs or results do not fit the joint graph.
    """
    for half in (forward, backward):
        if not isinstance(half, fx.GraphModule):
            raise TypeError(f"partition_fn returned a {type(half).__name__} where a torch.fx.GraphModule is expected")
    (output,) = (n for n in forward.graph.nodes if n.op == "output")
    returned = list(output.args[0])
    primals = [n for n in forward.graph.nodes if n.op == "placeholder"]
    taken = [n for n in backward.graph.nodes if n.op == "placeholder"]
    (end,) = (n for n in backward.graph.nodes if n.op == "output")
    _expect("inputs of the forward", len(primals), arguments)
    saved = returned[results:]
    _expect("inputs of the backward", len(taken), len(saved) + len(tangents))
    further = sum(len(g.dense) for g in gradients.wrapped_gradients)
    beyond = sum(k >= arguments for k in gradients.inputs)
    _expect("results of the backward", len(end.args[0]), arguments + beyond + further)
    written = {primals[k] for k in (*gradients.overwritten, *gradients.unkept)}
    written |= {returned[k] for k in gradients.lent if isinstance(returned[k], fx.Node)}
    shown = {n for n in returned[:results] if isinstance(n, fx.Node)}
    for k, node in enumerate(saved):
        root = root_of(node)
        if root in written or (root in shown and root is not node):
            with forward.graph.inserting_before(output):
                saved[k] = forward.graph.call_function(ROLES["clone"], (node,))
            saved[k].meta = {**node.meta, "val": torch.clone(node.meta["val"])}
    output.args = ((*returned[:results], *saved),)
    forward.recompile()
    at = {n: k for k, n in enumerate(primals)}
    places = [("input", at[n]) if n in at else ("output", results + k) for k, n in enumerate(saved)]
    values = saved_values(places, [_value(n) for n in saved], gradients, results, symbolic=True)
    order = sorted(range(len(saved)), key=lambda k: values[k].is_tensor)  # sizes come first
    for node, given in zip(taken, (*(_value(saved[k]) for k in order), *tangents), strict=True):
        if (found := _kind(_value(node))) != (wanted := _kind(given)):
            raise ValueError(
                f"partition_fn: {node.name} of the backward is {found} where it is given {wanted}; a backward takes saved sizes, saved "
                "tensors in the order in which the forward returns them, then tangents"
            )
    rest = _beyond(gradients.inputs, arguments, len(gradients.inputs) + further)
    place = {k: arguments + n for n, k in enumerate(rest)}
    inputs = (*range(arguments), *(gradients.inputs[k] if k < len(gradients.inputs) else -1 - k for k in rest))
    wrapped = tuple(replace(g, dense=tuple(place[k] for k in g.dense)) for g in gradients.wrapped_gradients)
    return CompiledBackward(
        graph=backward,
        arguments=arguments,
        results=results,
        constant=constant_results(returned[:results], gradients),
        saved=tuple(values[k] for k in order),
        tangents=tuple(map(Tangent.of, tangents)),
        watched=watched_tensors(gradients, values, partial=False),
        gradients=replace(gradients, inputs=inputs, wrapped_gradients=wrapped),
    )


def _expect(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"partition_fn: the number of {what} is {found}, it must be {expected}")


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def _kind(value: Any) -> str:
    """What a value is, in words that hold for all sizes."""
    return f"a {value.dtype} tensor of {value.dim()} dimensions" if isinstance(value, torch.Tensor) else "a number"


def root_of(node: Any) -> Any:
    """What a chain of views views in the end; None for anything but a tensor."""
    if not isinstance(_value(node), torch.Tensor):
        return None
    while node.op == "call_function":
        source = node.args[0] if node.args else None
        if isinstance(node.target, OpOverload):
            info = op_info(node.target)
            if info.kind != "view":
                return node
            source = info.argument(info.view_arg, node.args, node.kwargs)
        if not isinstance(source, fx.Node):
            return node
        node = source
    return node
