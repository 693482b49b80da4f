"""Measurements: interleaved timing, errors against float64, peak memory of a process."""

import math
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Thunk = Callable[[], Any]


def calls_per_sample(thunk: Thunk, sample_s: float) -> int:
    """How many calls take about `sample_s` seconds, from a short trial."""
    thunk()
    start, n = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < sample_s and n < 10000:
        thunk()
        n += 1
    return max(1, round(n * sample_s / spent))


def interleaved(thunks: Mapping[str, Thunk], rounds: int, sample_s: float = 0.01) -> dict[str, list[float]]:
    """Seconds per call of each thunk, one value a round.

    In each round every thunk runs once, in a rotating order, so that a change of the machine's speed meets all alike.
    """
    names = list(thunks)
    repeat = {name: calls_per_sample(thunks[name], sample_s) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    for r in range(rounds):
        shift = r % len(names)
        for name in names[shift:] + names[:shift]:
            thunk, n = thunks[name], repeat[name]
            thunk()  # brings this thunk's code and data back into the caches
            start = time.perf_counter()
            for _ in range(n):
                thunk()
            samples[name].append((time.perf_counter() - start) / n)
    return samples


def device_us(thunk: Thunk, calls: int) -> float:
    """Microseconds of one call, between events on the CUDA device's stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        thunk()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


def interleaved_us(thunks: Mapping[str, Thunk], rounds: int) -> dict[str, float]:
    """The median of `device_us` of each thunk, over rounds in which every one runs once, in a rotating order."""
    calls = {n: max(1, min(50, round(2e4 / max(device_us(t, 2), 1)))) for n, t in thunks.items()}
    samples: dict[str, list[float]] = {name: [] for name in thunks}
    order = list(thunks)
    for k in range(rounds):
        shift = k % len(order)
        for name in order[shift:] + order[:shift]:
            samples[name].append(device_us(thunks[name], calls[name]))
    return {name: statistics.median(s) for name, s in samples.items()}


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median over rounds of numerator / denominator."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def geomean(values: Sequence[float]) -> float:
    """The geometric mean; nan for no values."""
    return math.exp(sum(math.log(v) for v in values) / len(values)) if values else math.nan


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def errors(result: Any, reference: Any) -> dict[str, float]:
    """Largest absolute error and relative error norm of all tensors of `result` against the float64 `reference`.

    Raises AssertionError where the structure, a shape or an integer dtype differs.
    """
    got, want = _tensors(result), _tensors(reference)
    assert len(got) == len(want), f"{len(got)} tensors instead of {len(want)}"
    worst = difference = norm = 0.0
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape, f"shape {tuple(g.shape)} instead of {tuple(w.shape)}"
        if not w.is_floating_point():
            assert g.dtype == w.dtype, f"dtype {g.dtype} instead of {w.dtype}"
        wide = w.double()
        delta = torch.where(g.double() == wide, 0.0, g.double() - wide)  # equal infinities differ by nothing
        worst = max(worst, float(delta.abs().max()) if delta.numel() else 0.0)
        difference += float(delta.square().sum())
        norm += float(wide.nan_to_num(0, 0, 0).square().sum())
    return {"max_abs": worst, "rel_norm": math.sqrt(difference / norm) if norm else math.sqrt(difference)}


def within_twice(mine: Mapping[str, float], eager: Mapping[str, float], result: Any) -> bool:
    """The accuracy rule: at most twice eager's error, or one rounding step of its dtype at its largest value."""
    floats = [t for t in _tensors(result) if t.is_floating_point()]
    step = max((torch.finfo(t.dtype).eps for t in floats), default=0.0)
    scale = max((float(t.double().abs().nan_to_num(0, 0, 0).max()) for t in floats if t.numel()), default=0.0)
    return mine["max_abs"] <= max(2 * eager["max_abs"], step * scale) and mine["rel_norm"] <= max(
        2 * eager["rel_norm"], step
    )


def reset_peak() -> None:
    """Start a new high-water mark of this process's resident memory (Linux)."""
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
    except OSError:
        return  # the mark then covers the whole process: larger, and still an upper bound


def peak_rss_mb() -> float:
    """Highest resident memory since `reset_peak` (or since the start), in MB."""
    try:
        with open("/proc/self/status") as f:
            for line in f:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
