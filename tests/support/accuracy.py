"""How results are judged: by a float64 run, beside eager's."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_as_accurate(found: Tensor, eager: Tensor, exact: Tensor) -> None:
    """At most twice eager's error, and the same values that are not finite."""
    assert (found.dtype, found.shape, found.stride()) == (eager.dtype, eager.shape, eager.stride())
    odd = ~torch.isfinite(eager)
    assert torch.equal(torch.isnan(found), torch.isnan(eager))
    assert torch.equal(found[odd].nan_to_num(0), eager[odd].nan_to_num(0))
    if odd.all():
        return
    truth = exact[~odd]
    ours, theirs = ((t.double()[~odd] - truth).abs() for t in (found, eager))
    floor = 2 * torch.finfo(found.dtype).eps * float(truth.abs().max())
    assert float(ours.max()) <= max(2 * float(theirs.max()), floor)
    assert float(ours.square().mean()) <= 4 * float(theirs.square().mean()) + floor**2 / 100


__all__ = ["assert_as_accurate"]
