"""Is what compiled code did what eager does? Facts and exception types exactly, values by a float64 run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from opforge.testing.judge import as_right, equal, shown
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
    unequal = [k for k, t in eager.values.items() if k in ours.values and not equal(t, ours.values[k])]
    if unequal:
        judge = wide("float64")
        exact, lows = judge.values, judge.lows
        own = _errors_of_float64(eager, wide, exact, [k for k in unequal if k not in lows])
        unequal = [
            k
            for k in unequal
            if not as_right(eager.values[k], ours.values[k], exact.get(k), [], own.get(k, 0.0), lows.get(k))
        ]
    runs: list[Sight] = []
    for count in (NOISY_RUNS, MANY_RUNS):
        if unequal:
            runs += [noisy(seed) for seed in range(len(runs), count)]
        unequal = [
            name
            for name in unequal
            if not as_right(
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
        found.append((kind, f"{name}: {shown(eager.values[name], ours.values[name], exact.get(name))}{lacking}"))
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


def _name(error: Exception | None) -> str:
    return (
        f"raises {type(error).__name__} ({(str(error).splitlines() or [''])[0][:160]})" if error else "raises nothing"
    )
