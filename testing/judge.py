"""Are values as right as eager's? By a float64 run, and by how far eager's own results move when its kernels round otherwise."""

from __future__ import annotations

import torch

__all__ = ["as_right", "equal", "shown"]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same numbers, nan beside nan."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def as_right(
    eager: torch.Tensor,
    ours: torch.Tensor,
    exact: torch.Tensor | None,
    noisy: list[torch.Tensor],
    own: float,
    low: torch.Tensor | None = None,
) -> bool:
    """Whether the error is at most twice that of eager's runs, and one unit in the last place at the scale of the tensor. Elements
    that are not floating or not finite are equal to eager's, or at least two of eager's own runs disagree about them, or ours is right and
    eager is not.
    """
    if exact is None or exact.shape != eager.shape:
        exact, low = eager, None
    o, x = ours.double(), exact.double()
    rest = torch.zeros_like(x) if low is None else low
    runs = [eager.double(), *(t.double() for t in noisy if t.shape == eager.shape)]
    same = (o == runs[0]) | (o.isnan() & runs[0].isnan())
    unsure = torch.zeros_like(same)
    for run in runs[1:]:
        unsure |= (run != runs[0]) & ~(run.isnan() & runs[0].isnan())
    if not eager.is_floating_point():
        return bool((same | unsure | (o == x)).all())
    finite = x.isfinite() & o.isfinite()
    for run in runs:
        finite &= run.isfinite()
    scale = torch.where(finite, x.abs(), 0).max() if x.numel() else 0
    worst = own + max(
        (float(torch.where(finite, (run - x - rest).abs(), 0).max()) for run in runs if x.numel()), default=0.0
    )
    close = (o - x - rest).abs() <= 2 * worst + torch.finfo(eager.dtype).eps * scale + torch.finfo(eager.dtype).tiny
    wavering = unsure & ~torch.stack([r.isfinite() for r in runs]).all(0)
    return bool((torch.where(finite, close, same) | wavering).all())


def shown(eager: torch.Tensor, ours: torch.Tensor, exact: torch.Tensor | None) -> str:
    """How many elements differ, and the one that differs most."""
    wrong = (eager != ours) & ~((eager != eager) & (ours != ours))
    at = tuple(
        int(i)
        for i in (wrong * (eager.double() - ours.double()).abs().nan_to_num(nan=1e30)).flatten().argmax().unsqueeze(0)
    )
    k = at[0]
    text = f"{int(wrong.sum())} of {wrong.numel()} differ, flat position {k}: eager {eager.flatten()[k].item()!r}, here {ours.flatten()[k].item()!r}"
    if exact is not None and exact.shape == eager.shape:
        text += f", float64 {exact.flatten()[k].item()!r}"
    return text
