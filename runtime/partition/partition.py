"""The entry point: a joint graph in, forward and backward out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from torch import fx

from .bans import default_rules
from .budget import choose_within
from .cut import Choice, choose
from .facts import gather
from .split import Halves, split


@dataclass(frozen=True)
class Partition:
    """A joint graph, cut in two.

    forward        primals → (forward outputs…, saved tensors…, saved numbers…), one flat tuple.
    backward       saved tensors…, saved numbers…, tangents… → one gradient per primal that the joint graph gave, None kept.
    saved          names of the saved values in both graphs, in that order.
    saved_tensors  how many of them are tensors; they come first.
    saved_symbols  how many are numbers (sizes).
    saved_bytes    bytes that are kept only for the backward: not those of inputs or forward outputs. Sizes by their hints.
    origins        for each saved value what it is: ("primal", position), ("output", position) or ("saved", position in `saved`).
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: tuple[str, ...]
    saved_tensors: int
    saved_symbols: int
    saved_bytes: int
    origins: tuple[tuple[str, int], ...]


def partition(
    joint: fx.GraphModule,
    num_primals: int,
    num_forward_outputs: int,
    *,
    policy: Literal["default", "min_cut"] = "min_cut",
    budget: float = 1.0,
    never_saved_raw: Collection[int] = (),
    lent: Collection[int] = (),
    measure: Callable[[Halves], int | None] | None = None,
) -> Partition:
    """Cut a functional joint graph into a forward and a backward.

    The placeholders are `num_primals` inputs of the forward, then the tangents; the result is `(forward outputs, gradients)`. Nodes carry
    `meta["val"]`; those recorded while the backward ran `meta["backward"]`; those that the user wants computed again
    `meta["region"]` (the number of the checkpointed region). `never_saved_raw`: positions of inputs that are overwritten after the
    forward; `lent`: positions of forward outputs that a caller may overwrite. What the backward reads of them is copied.

    policy  `default`: what the backward reads is kept · `min_cut`: fewest bytes, cheap values are computed again.
    budget  part of the bytes that `min_cut` keeps which may be kept: below 1, more is computed again.
    measure  the peak memory of two halves, or None if it is not known: among those that a budget chooses from, it must fall with the budget.

    Raises `ValueError` for a graph of another form, `UnsupportedError` for a value that can neither be kept nor computed again.
    """
    if policy not in ("default", "min_cut"):
        raise ValueError(f"policy is 'default' or 'min_cut', not {policy!r}")
    if not 0.0 <= budget <= 1.0:
        raise ValueError(f"budget lies between 0 and 1, not {budget!r}")
    f = gather(joint, num_primals, num_forward_outputs, frozenset(never_saved_raw), frozenset(lent))

    def measured(choice: Choice) -> int | None:
        return None if measure is None else measure(split(joint, f, choice))

    choice = choose(f, default_rules(f)) if policy == "default" else choose_within(f, budget, measured)
    halves = split(joint, f, choice)
    return Partition(
        halves.forward,
        halves.backward,
        halves.saved,
        halves.tensors,
        len(halves.saved) - halves.tensors,
        choice.bytes(f),
        halves.origins,
    )
