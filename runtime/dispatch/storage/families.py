"""Which tensors autograd knows as views of one tensor: they share its history and its version counter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...torch_compat import refuses_writes
from .overlap import overlaps_itself
from .regions import Layout


@dataclass(frozen=True)
class Family:
    """`root` is what the members are views of (it may be one of them), with its layout."""

    root: torch.Tensor
    layout: Layout


def family_of(members: Sequence[torch.Tensor]) -> Family | None:
    """The family of tensors that lie in one storage, or None where a write to one is not a write to the others for autograd: one was
    detached, made under `no_grad`, by a view with several results, or follows gradients that the others do not.
    """
    root = members[0]._base if members[0]._is_view() else members[0]
    if root is None:
        return None
    for t in members:
        if t is not root and (not t._is_view() or t._base is not root or refuses_writes(t)):
            return None
        if t.requires_grad != root.requires_grad or t.is_inference():
            return None
    layout = Layout.of(root)
    if not layout.plain or layout.conj or layout.neg or overlaps_itself(layout):
        return None
    return Family(root, layout)
