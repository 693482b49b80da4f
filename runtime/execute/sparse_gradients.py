"""A compiled backward that gets gradients which are no strided tensors, as a table looked up with `sparse=True` has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ...errors import UnsupportedError
from ...generated.dispatch_tables import ROLES
from ..observe import counters
from ..partition.partial import without_tangents
from .autograd_function import Halves


class _SparseGradients(fx.Interpreter):
    """Runs a backward on gradients that may be sparse. Autograd puts the dense one first where it adds two."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is ROLES["add"] and len(args) == 2 and all(isinstance(a, torch.Tensor) for a in args):
            args = sorted(args, key=lambda t: t.layout is not torch.strided)
        return super().call_function(target, tuple(args), kwargs)


def sparse_backward(backward: fx.GraphModule, halves: Halves, strict: bool) -> Callable[[int], Callable[..., Any]]:
    """The backward by eager kernels, for calls in which gradients arrive that are no strided tensors (of a table that is looked up with
    `sparse=True`), so that those of inputs are sparse where eager's are. The bits of its argument: as for `Partial.ready`. `strict`: it
    raises `UnsupportedError` instead.
    """
    made: dict[int, Callable[..., Any]] = {}

    def ready(missing: int) -> Callable[..., Any]:
        reason = "a gradient arrives that is no strided tensor (sparse): its backward runs by eager kernels"
        if strict:
            raise UnsupportedError(reason)
        if missing not in made:
            counters.count_fallback(f"UnsupportedError: {reason}")
            unreached = unreached_from(halves, missing)
            absent = {k for k in range(len(halves.tangents)) if missing >> k & 1}
            graph = without_tangents(backward, absent, unreached) if missing else backward
            made[missing] = _SparseGradients(graph).boxed_run
        return made[missing]

    return ready


def unreached_from(halves: Halves, missing: int) -> set[int]:
    """Positions of gradients to which there is no way from the tangents that are given."""
    given = ((1 << len(halves.tangents)) - 1) & ~missing
    return {k for k, way in enumerate(halves.gradients.reached) if not way & given}
