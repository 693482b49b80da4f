"""Gradients of a recorded program: autograd runs backward over the traced tensors while the recorder goes on writing.

Autograd itself decided, as the program ran, what depends on what: through views, writes in place, `detach` and blocks without grad. All
that is added here are tangents, one placeholder for each result that autograd follows, and one call for the gradients of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...generated.schemas import InputAliasInfo, MutationType
from ..torch_compat import pytree
from .inputs import Inputs
from .merge import Entered
from .metadata import Found
from .overlap import is_dense
from .recorder import Recorder
from .regions import Layout


@dataclass(frozen=True)
class Gradients:
    """The backward half of a joint graph, whose output is (results, gradients).

    tangents   results of the graph that autograd follows, in the order of the tangents' placeholders; the others are not differentiable.
    inputs     graph inputs that have a gradient, in the order of the gradients.
    overwritten  graph inputs that the wrapper writes to after the graph has run: their first contents are gone in the backward.
    watched_inputs, watched_results  graph inputs and results that eager's backward reads: it refuses to run once they were written to.
    unkept     graph inputs that eager's backward does not read, so that a caller may write to them after the forward, and those whose
               version counter moves in the wrapper: our backward must not read them either.
    bumped     those of `overwritten` whose version counter tells of the write.
    """

    tangents: tuple[int, ...]
    inputs: tuple[int, ...]
    overwritten: tuple[int, ...]
    watched_inputs: tuple[int, ...] = ()
    watched_results: tuple[int, ...] = ()
    unkept: tuple[int, ...] = ()
    bumped: tuple[int, ...] = ()


def differentiate(
    inputs: Inputs, recorder: Recorder, entered: Entered, found: Found
) -> tuple[Gradients, list[Any]] | None:
    """Record the gradients of `found`'s results for every input that requires grad; returns also their nodes. None when no result depends
    on such an input. Raises what autograd raises: a tensor that it needs was written in place, a formula is missing.
    """
    followed = [(k, t) for k, t in enumerate(found.tensors) if t is not None and t.requires_grad]
    wanted = [(k, inputs.edges[i]) for k, i in enumerate(entered.graph_inputs) if inputs.edges[i] is not None]
    if not followed or not wanted:
        return None
    needed = saved_storages([t for _, t in followed])
    tangents = _tangents(recorder, [found.outputs[k] for k, _ in followed], inputs.fake_mode)
    recorder.origin, recorder.backward = None, True
    with recorder:
        gradients = torch.autograd.grad([t for _, t in followed], [e for _, e in wanted], tangents, allow_unused=True)
    nodes = [None if g is None else recorder.current(recorder.value(g)) for g in gradients]
    overwritten = tuple(k for k, i in enumerate(entered.graph_inputs) if found.meta.input_info[i].mutates_data)
    beside = _beside(inputs, recorder, entered, found)
    watched_inputs = tuple(
        k
        for k, i in enumerate(entered.graph_inputs)
        if isinstance(inputs.fakes[i], torch.Tensor)
        and recorder.regions.key(inputs.fakes[i]) in needed
        and not _moves(found.meta.input_info[i])
        and k not in beside
    )
    watched_results = tuple(
        k
        for k, t in enumerate(found.tensors)
        if t is not None and recorder.regions.key(t) in needed and t.requires_grad
    )
    positions = tuple(k for k, _ in followed), tuple(k for k, _ in wanted), overwritten
    unkept = tuple(
        k
        for k, i in enumerate(entered.graph_inputs)
        if isinstance(inputs.fakes[i], torch.Tensor)
        and (recorder.regions.key(inputs.fakes[i]) not in needed or k in beside or _moves(found.meta.input_info[i]))
    )
    bumped = tuple(k for k in overwritten if found.meta.input_info[entered.graph_inputs[k]].seen)
    return Gradients(*positions, watched_inputs, watched_results, unkept, bumped), nodes


def _beside(inputs: Inputs, recorder: Recorder, entered: Entered, found: Found) -> set[int]:
    """Graph inputs in a storage of which another input is mutated: they may share its version counter."""
    mutated = {
        i: recorder.regions.key(inputs.fakes[i])
        for i in entered.graph_inputs
        if found.meta.input_info[i].mutation_type is not MutationType.NOT_MUTATED
    }
    return {
        k
        for k, i in enumerate(entered.graph_inputs)
        if isinstance(inputs.fakes[i], torch.Tensor)
        and any(j != i and key == recorder.regions.key(inputs.fakes[i]) for j, key in mutated.items())
    }


def _moves(info: InputAliasInfo) -> bool:
    """Whether the wrapper changes more of an input than its elements: how often its version moves then is not known here."""
    return info.mutation_type not in (MutationType.NOT_MUTATED, MutationType.DATA)


def saved_storages(results: Sequence[torch.Tensor]) -> set[int]:
    """Keys of the storages that the autograd graph behind `results` keeps tensors of."""
    found: set[int] = set()
    todo = [t.grad_fn for t in results]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [n for n, _ in node.next_functions]
        names = {name.removeprefix("_raw") for name in dir(node) if name.startswith("_raw_saved_")}
        kept = [getattr(node, name) for name in names if hasattr(type(node), name)]
        for leaf in pytree.tree_leaves([kept, getattr(node, "saved_tensors", ())]):
            if isinstance(leaf, torch.Tensor):
                found.add(leaf.untyped_storage()._cdata)
    return found


def _tangents(recorder: Recorder, results: Sequence[fx.Node], fake_mode: Any) -> list[torch.Tensor]:
    """Placeholders after the inputs, laid out as the results are, where those are dense (row-major for sizes known only later)."""
    graph = recorder.graph
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    tangents = []
    for k, result in enumerate(results):
        like = result.meta["val"]
        layout = Layout.of(like)
        with fake_mode:
            if layout.plain and is_dense(layout):
                tangent = torch.empty_strided(layout.size, layout.stride, dtype=like.dtype, device=like.device)
            else:
                tangent = torch.empty(layout.size, dtype=like.dtype, device=like.device)
        with graph.inserting_after(last):
            last = graph.placeholder(f"tangent{k}")
        last.meta |= {"val": tangent, "tangent": True, "backward": True}
        recorder.regions.add(tangent, last)
        tangents.append(tangent)
    return tangents
