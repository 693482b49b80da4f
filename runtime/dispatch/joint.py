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

from ...errors import UnsupportedError
from ...generated.schemas import InputAliasInfo, MutationType
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
    inputs: Inputs, recorder: Recorder, entered: Entered, found: Found, saved: Saved
) -> tuple[Gradients, list[Any]] | None:
    """Record the gradients of `found`'s results for every input that requires grad; returns also their nodes. None when no result depends
    on such an input. Raises what autograd raises: a tensor that it needs was written in place, a formula is missing.
    """
    followed = [(k, t) for k, t in enumerate(found.tensors) if t is not None and t.requires_grad]
    wanted = [(k, inputs.edges[i]) for k, i in enumerate(entered.graph_inputs) if inputs.edges[i] is not None]
    if not followed or not wanted:
        return None
    tangents = _tangents(recorder, [found.outputs[k] for k, _ in followed], inputs.fake_mode)
    recorder.origin, recorder.backward = None, True
    with recorder:
        gradients = torch.autograd.grad([t for _, t in followed], [e for _, e in wanted], tangents, allow_unused=True)
    needed = saved.read
    for i in entered.graph_inputs:
        if _moves(found.meta.input_info[i]) and recorder.regions.key(inputs.fakes[i]) in needed:
            raise UnsupportedError(
                f"input {i} is given another layout or storage, and its elements are needed by the backward"
            )
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


def written_since(t: torch.Tensor, version: int) -> RuntimeError:
    """What autograd raises when a tensor that it saved at `version` was written to."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{t.dtype}{list(t.shape)} is at version {t._version}; expected version {version} instead"
    )


class Saved:
    """What autograd saves while the program runs, and which of that its backward reads (in the inner functions of writes through views too).

    Hooks replace autograd's own check of versions; this makes it.
    """

    def __init__(self) -> None:
        self.read: set[int] = set()

    def hooks(self) -> Any:
        """The context that the program runs in."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, t: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        return t, None if t.is_inference() else t._version

    def _unpack(self, packed: tuple[torch.Tensor, int | None]) -> torch.Tensor:
        t, version = packed
        if version is not None and t._version != version:
            raise written_since(t, version)
        self.read.add(t.untyped_storage()._cdata)
        return t


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
