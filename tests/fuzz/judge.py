"""Is what compiled code did what eager does? Facts and exception types exactly, values by a float64 run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from opforge.testing.noise import MANY_RUNS, NOISY_RUNS

from .observe import Sight


def differences(
    eager: Sight, ours: Sight, wide: Callable[[str], Sight], noisy: Callable[[int], Sight]
) -> list[tuple[str, str]]:
    """(kind, text) of each difference. `wide` runs the program with one floating dtype, `noisy` with roundings of a seed."""
    found: list[tuple[str, str]] = []
    for stage in {**eager.raised, **ours.raised}:
        a, b = eager.raised.get(stage), ours.raised.get(stage)
        if type(a) is not type(b):
            found.append(
                (f"exception in {stage.partition(' after')[0]}", f"{stage}: eager {_name(a)}, here {_name(b)}")
            )
    if found:
        return found
    for name in {**eager.facts, **ours.facts}:
        if eager.facts.get(name) != ours.facts.get(name):
            kind = name.rpartition(": ")[2].removeprefix("afterwards ")
            found.append((kind, f"{name}: eager {eager.facts.get(name)}, here {ours.facts.get(name)}"))
    if any(kind == "dtype, size" for kind, _ in found):
        return found
    unequal = [k for k, t in eager.values.items() if k in ours.values and not _equal(t, ours.values[k])]
    if unequal:
        judge = wide("float64")
        exact, lows = judge.values, judge.lows
        own = _errors_of_float64(eager, wide, exact, [k for k in unequal if k not in lows])
        unequal = [
            k
            for k in unequal
            if not _judge(eager.values[k], ours.values[k], exact.get(k), [], own.get(k, 0.0), lows.get(k))
        ]
    runs: list[Sight] = []
    for count in (NOISY_RUNS, MANY_RUNS):
        if unequal:
            runs += [noisy(seed) for seed in range(len(runs), count)]
        unequal = [
            name
            for name in unequal
            if not _judge(
                eager.values[name],
                ours.values[name],
                exact.get(name),
                [r.values[name] for r in runs if name in r.values],
                own.get(name, 0.0),
                lows.get(name),
            )
        ]
    moved = next((e for r in runs for stage, e in r.raised.items() if stage not in eager.raised), None)
    lacking = f" (eager with moved roundings {_name(moved)})" if moved else ""  # so that they excuse nothing
    for name in unequal:
        kind = "gradient" if name.startswith("gradient") else "value"
        found.append((kind, f"{name}: {_show(eager.values[name], ours.values[name], exact.get(name))}{lacking}"))
    return found


def _errors_of_float64(
    eager: Sight, run: Callable[[str], Sight], exact: dict[str, torch.Tensor], names: list[str]
) -> dict[str, float]:
    """Eager's error in each float64 result. There is nothing to judge it by: the error of a float32 run, at the scale of float64."""
    wanted = [k for k in names if eager.values[k].dtype == torch.float64 and k in exact]
    if not wanted:
        return {}
    narrow = run("float32").values
    scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    errors = {}
    for k in wanted:
        if k in narrow and narrow[k].shape == exact[k].shape:
            gap = (narrow[k].double() - exact[k].double()).abs()
            gap = gap[gap.isfinite()]
            errors[k] = float(gap.max()) * scale if gap.numel() else 0.0
    return errors


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _judge(
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


def _show(eager: torch.Tensor, ours: torch.Tensor, exact: torch.Tensor | None) -> str:
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


def _name(error: Exception | None) -> str:
    return (
        f"raises {type(error).__name__} ({(str(error).splitlines() or [''])[0][:160]})" if error else "raises nothing"
    )
