"""The backward of a training graph as data: what it computes, what the forward keeps for it and under which conditions, and its variants for
calls in which some results got no gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..dispatch.autograd.joint import Gradients
from ..dispatch.storage.regions import Layout
from ..partition.partial import without_gradients, without_tangents

Place = tuple[str, int]
"""Where the autograd function has a value: ("input", k) of the graph; ("output", k) of the forward graph; ("wrapper", k) of the arguments
and ("wrapped", k) of the results that are tensor subclasses."""
Described = tuple[torch.device, torch.dtype, torch.Size, tuple[int, ...]]
ALWAYS = -1
"""In the place of bits: all tangents need it."""


@dataclass(frozen=True)
class Saved:
    """A value that the forward keeps for the backward.

    place       where the forward has it.
    is_tensor   whether it is a tensor (else a size).
    needed_for  the tangents, as bits, that need it: where none of them is given, a write to it since the forward does not matter.
    bump        what the wrapper adds to its version when it writes the input after the graph has run.
    expected    what the backward was compiled for where it is an input: a caller can give that other memory, of another layout, between
                forward and backward (`x.data = y`). None for all others, and where only the forward knows it.
    described_by_forward  whether it is an input of which only the forward knows sizes and strides.
    """

    place: Place
    is_tensor: bool
    needed_for: int = ALWAYS
    bump: int = 0
    expected: Described | None = None
    described_by_forward: bool = False


@dataclass(frozen=True)
class Tangent:
    """The gradient of a result, which the backward takes.

    like     a fake tensor of its dtype, device and sizes.
    strides  those that the backward expects; None for row-major.
    """

    like: torch.Tensor
    strides: tuple[int, ...] | None

    @classmethod
    def of(cls, like: torch.Tensor) -> Tangent:
        return cls(like, tuple(like.stride()) if Layout.of(like).plain else None)

    def zeros(self, shape: Sequence[int] | None = None) -> torch.Tensor:
        """What stands in for an undefined tangent; of `shape` where sizes are symbolic."""
        made = torch.zeros((), dtype=self.like.dtype, device=self.like.device)
        return made.expand(self.like.shape if shape is None else shape)


@dataclass(frozen=True)
class Watched:
    """A tensor that eager's backward reads and ours does not, so that autograd does not watch it for ours; we do.

    place       where the forward has it.
    bump        what is added to its version because the wrapper is about to write it.
    needed_for  the tangents, as bits, for which eager's backward reads it.
    is_held     whether it is a parameter or a buffer, which its module holds anyway: itself is kept, of others the version counter.
    """

    place: Place
    bump: int
    needed_for: int
    is_held: bool = False


@dataclass(frozen=True)
class CompiledBackward:
    """The backward of a training graph.

    graph       it takes what is saved, then tangents; it returns gradients.
    arguments   the forward's placeholders.
    results     graph results that the program returns; the forward's further results are what is saved.
    constant    those of them that are tensors which autograd does not follow.
    saved       for each of the graph's first placeholders: tensors, then sizes, or the other way round.
    tangents    for each of the graph's further placeholders.
    watched     what nobody may have written since the forward, beside what is saved.
    gradients   what each result and gradient of the graph is to the program.
    partial     whether it is told which of the results got no gradient; else they count as if they had got zeros.
    symbolic    whether sizes are known only when the forward has run.
    into        positions in `saved` of tensors that gradients may be written over → of these gradients.
    scaled      whether all gradients are these tensors times the only tangent.
    weights     gradients that are those of parameters, by position, and `others`, where the graph has both: who asks for the gradient of an input
                only, as simulations do, does not pay for those of the parameters. () where that is not told apart.
    edges       for each gradient its position among the edges of autograd's node.
    unsaved     tensors among the forward's arguments that are not saved: gradients of gradients may need them.
    """

    graph: fx.GraphModule
    arguments: int
    results: int
    constant: tuple[int, ...]
    saved: tuple[Saved, ...]
    tangents: tuple[Tangent, ...]
    watched: tuple[Watched, ...]
    gradients: Gradients
    partial: bool = False
    symbolic: bool = False
    into: Mapping[int, int] = field(default_factory=dict)
    scaled: bool = False
    weights: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    edges: tuple[int, ...] = ()
    unsaved: tuple[int, ...] = ()

    @property
    def every_tangent(self) -> int:
        """All tangents, as bits."""
        return (1 << len(self.tangents)) - 1

    def unreached(self, undefined: int) -> set[int]:
        """Positions of gradients to which there is no way from the tangents that are defined; those at the bits of `undefined` are not."""
        given = self.every_tangent & ~undefined
        return {k for k, way in enumerate(self.gradients.reached) if not way & given}

    def absent(self, undefined: int) -> set[int]:
        """Positions of the tangents at the bits of `undefined`."""
        return {k for k in range(len(self.tangents)) if undefined >> k & 1}

    def left_out(self, left: int) -> tuple[int, ...]:
        """Positions of the gradients that nobody asks for: 1 for those of `weights`, 2 for `others`, 0 for none."""
        return ((), self.weights, self.others)[left]

    def variant(self, undefined: int, left: int = 0) -> fx.GraphModule:
        """The graph for calls in which the tangents at the bits of `undefined` are undefined, and the gradients `left_out` are not asked for. Its
        placeholders are the same.
        """
        if left:
            return without_gradients(self.variant(undefined), self.left_out(left))
        if not undefined:
            return self.graph
        return without_tangents(self.graph, self.absent(undefined), self.unreached(undefined))


def described(tensors: Sequence[torch.Tensor]) -> list[Described]:
    """What compiled code takes for granted of tensors: device, dtype, sizes and strides."""
    return [(t.device, t.dtype, t.shape, t.stride()) for t in tensors]


def constant_results(returned: Sequence[Any], gradients: Gradients, written: Collection[int] = ()) -> tuple[int, ...]:
    """Positions of the tensors among the results `returned` (nodes) that autograd does not follow; those that the forward has `written` into
    inputs are None.
    """
    others = {*gradients.tangents, *written, *(k for r in gradients.wrapped_results for k in r.dense)}
    return tuple(
        k
        for k, n in enumerate(returned)
        if k not in others and isinstance(n, fx.Node) and isinstance(n.meta["val"], torch.Tensor)
    )


def saved_values(
    places: Sequence[Place],
    values: Sequence[object],
    gradients: Gradients,
    results: int,
    *,
    needed_for: Sequence[int] = (),
    symbolic: bool = False,
) -> tuple[Saved, ...]:
    """What is saved at `places`, with fake `values`. `needed_for`: for each the tangents, as bits, from which and it something is computed; ()
    where the backward is not told which are given.
    """
    ours = needed_for or (ALWAYS,) * len(places)
    whole = (1 << len(gradients.tangents)) - 1
    found = []
    for place, value, needed in zip(places, values, ours, strict=True):
        where, k = place
        tensor = isinstance(value, torch.Tensor)
        if needed_for:
            needed = (gradients.read_for.get(place, ALWAYS) | needed) & whole
        # What the forward makes for the backward alone nobody else can write.
        guarded = bool(needed_for) and needed != whole and (where == "input" or k < results)
        is_input = tensor and where == "input"
        expected = _expected(value) if is_input else None
        found.append(
            Saved(
                place,
                tensor,
                needed if guarded else ALWAYS,
                _bump(place, gradients),
                expected,
                symbolic and is_input and expected is None,
            )
        )
    return tuple(found)


def _expected(value: Any) -> Described | None:
    """What the backward is compiled for, of a saved input, where its sizes and strides are numbers."""
    fixed = all(type(n) is int for n in (*value.shape, *value.stride()))
    return described([value])[0] if fixed else None


def watched_tensors(
    gradients: Gradients, saved: Sequence[Saved], *, partial: bool, held: frozenset[int] = frozenset()
) -> tuple[Watched, ...]:
    """What eager's backward reads beside `saved`. `held`: graph inputs that are parameters and buffers."""
    kept = {s.place for s in saved}
    read_for = gradients.read_for if partial else {}
    places = [("input", k) for k in gradients.watched_inputs] + [("output", k) for k in gradients.watched_results]
    found = [
        Watched(p, _bump(p, gradients), read_for.get(p, ALWAYS), p[0] == "input" and p[1] in held)
        for p in places
        if p not in kept
    ]
    found += [Watched(("wrapper", k), n, ALWAYS) for k, n in gradients.watched_wrappers]
    found += [Watched(("wrapped", k), 0, ALWAYS) for k, r in enumerate(gradients.wrapped_results) if r.watched]
    return tuple(found)


def _bump(place: Place, gradients: Gradients) -> int:
    where, k = place
    return int(where == "input" and k in gradients.bumped)
