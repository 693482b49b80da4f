"""What the backward of a graph asks of tensors where Dynamo follows it: in a graph that compiled autograd has captured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from .compiled import CompiledBackward, Described


class TracedGraphs:
    """The graphs of a backward as Dynamo finds them: each an attribute, because guards on an attribute do not mind what else is added."""

    def __init__(self, backward: CompiledBackward) -> None:
        self._backward = backward

    def name_of(self, undefined: int) -> str:
        """The attribute that has the graph for calls in which the tangents at the bits of `undefined` are not given."""
        name = f"undefined_{undefined}"
        if not hasattr(self, name):
            graph = self._backward.variant(undefined)
            setattr(self, name, fx.GraphModule(graph, graph.graph))  # one whose code exists already
        return name


def as_traced(
    saved: Sequence[torch.Tensor], hooked: Sequence[Described] | None, given: Sequence[tuple[int, Described]]
) -> list[torch.Tensor]:
    """Saved tensors as the graph reads them. `hooked`: what they were before `saved_tensors_hooks` packed them; else `given` describes those at
    some positions, which are inputs whose `.data` the caller may have replaced. Raises RuntimeError for another device or other sizes.
    """
    tensors = list(saved)
    for k, (device, dtype, shape, stride) in given if hooked is None else enumerate(hooked):
        t = tensors[k]
        if t.shape != shape or t.device != device:
            raise RuntimeError(
                f"a tensor saved for the backward had sizes {list(shape)} on {device}; now {list(t.shape)} on {t.device}"
            )
        tensors[k] = with_strides(t.to(dtype), stride)
    return tensors


def with_strides(t: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """The tensor with these strides, those of a row-major one for None; copied where it has others."""
    if strides is None:
        return t.contiguous()
    if t.stride() == strides:
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)
