"""What is known of tensors while a program is traced, for the conditions of `specs/decompositions.yaml`. `b` is the recorder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...torch_compat import known_equal, no_modes
from ..subclasses.wrappers import is_wrapper


@dataclass(frozen=True)
class Truth:
    """Where the elements of a mask let scores through, for all values of the inputs: they are true there, or 0 if they are floating; elsewhere they
    are false, or so low that nothing is left of a score.

    everywhere      all of them.
    lower_triangle  those whose last coordinate is at most the one before it, and no others; the last two dimensions have one size.
    """

    everywhere: bool = False
    lower_triangle: bool = False


def is_all_true(b: Any, mask: torch.Tensor) -> bool:
    """Whether all elements of a mask let scores through, whatever the inputs are."""
    return _truth(b, mask).everywhere


def is_lower_triangle(b: Any, mask: torch.Tensor) -> bool:
    """Whether just those elements of a mask let scores through that stand on the diagonal of its last two dimensions, which have one size, or
    below.
    """
    return _truth(b, mask).lower_triangle


def _truth(b: Any, mask: torch.Tensor) -> Truth:
    if b.truth is None or mask.requires_grad or is_wrapper(mask) or b.regions.get(mask) is None:
        return Truth()
    with no_modes():
        node = b.current(b.value(mask))
        if node not in b.truths:
            b.truths[node] = b.truth(node, b.constants)
    found: Truth = b.truths[node]
    return found


def masks_scores(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether a mask of two dimensions or more has none that the scores of queries [..., L, E] with keys [..., S, E] lack, is on their device,
    and is boolean or of their dtype.
    """
    scores = (*query.shape[:-1], key.shape[-2])
    if (
        mask.device != query.device
        or mask.dtype not in (torch.bool, query.dtype)
        or not 2 <= mask.ndim <= len(scores)
        or is_wrapper(query)
        or is_wrapper(key)
    ):
        return False
    return all(known_equal(n, 1) or known_equal(n, m) for n, m in zip(mask.shape[::-1], scores[::-1], strict=False))


def enlarges_scores(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether a mask has a dimension of more than one element where the scores of queries [..., L, E] with keys [..., S, E] have one, or none."""
    if mask is None or is_wrapper(mask) or is_wrapper(query) or is_wrapper(key):
        return False
    sizes = [(*query.shape[:-1], key.shape[-2])[::-1], (1, 1, *key.shape[:-2][::-1])]
    for k, n in enumerate(mask.shape[::-1]):
        have = [s[k] for s in sizes if k < len(s)]
        if type(n) is int and n > 1 and all(type(h) is int and h == 1 for h in have):
            return True
    return False


def draws_anew(b: Any, probability: float) -> bool:
    """Whether a call that drops elements with this probability draws no numbers from eager's random stream."""
    return b.draws is not None or (isinstance(probability, (int, float)) and probability == 0)
