"""Process-wide counts of what was compiled and of what was not, with the reasons: read by `stats`, `explain`, the benchmarks and the tests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any

from .log import LOG

_lock = Lock()
_externs: Counter[tuple[str, str]] = Counter()
_fallbacks: Counter[str] = Counter()
_retries: Counter[str] = Counter()
_tuned: Counter[str] = Counter()
_dropped: Counter[str] = Counter()
_totals: Counter[str] = Counter()
_calls: Counter[str] = Counter()
_unrecorded: Counter[str] = Counter()
_seconds: dict[str, float] = defaultdict(float)


def count_extern(op: str, reason: str) -> None:
    """One node that runs by the eager kernel of `op` (`namespace.name.overload`), and why."""
    with _lock:
        _externs[op, reason] += 1


@contextmanager
def uncounted() -> Iterator[None]:
    """What is lowered inside is a trial: its eager kernels are not counted."""
    with _lock:
        before = _externs.copy()
    try:
        yield
    finally:
        with _lock:
            _externs.clear()
            _externs.update(before)


def count_fallback(reason: str) -> None:
    """One whole graph that runs eagerly, and why."""
    LOG.info("a graph runs eagerly: %s", reason)
    with _lock:
        _fallbacks[reason] += 1


def count_retry(reason: str) -> None:
    """One configuration of a kernel that does not compile or does not fit, and why; the next one is tried, and after the last the graph runs
    eagerly. Or a kernel that works on copies, since it has no binary for odd addresses.
    """
    LOG.info("a configuration of a kernel is left out: %s", reason)
    with _lock:
        _retries[reason] += 1


def count_tuned(how: str) -> None:
    """One kernel that `max_autotune` was asked for, and what came of it: measured, a stored choice, or not measured, and why."""
    with _lock:
        _tuned[how] += 1


def count_dropped(reason: str) -> None:
    """One configuration that was to be measured and did not compile or run, and why."""
    with _lock:
        _dropped[reason] += 1


def count_graph(
    kernels: int,
    externs: Mapping[str, int],
    seconds: Mapping[str, float],
    arena_bytes: int,
    cached: bool,
    *,
    graphs: int = 1,
) -> None:
    """One compiled graph: its kernels, its calls of eager kernels by operator, seconds by stage, bytes of its arena, whether it came out of the
    cache. `graphs` is 0 for the backward of one that was counted before.
    """
    LOG.info(
        "%s: %d kernels, eager kernels %s, arena %d bytes, %.2f s%s",
        "a graph" if graphs else "a backward",
        kernels,
        dict(externs),
        arena_bytes,
        sum(seconds.values()),
        ", from the cache" if cached else "",
    )
    with _lock:
        _totals["graphs"] += graphs
        _totals["kernels"] += kernels
        _totals["cache_hits"] += graphs * int(cached)
        _totals["arena_bytes"] = max(_totals["arena_bytes"], arena_bytes)
        _calls.update(externs)
        for stage, s in seconds.items():
            _seconds[stage] += s


def count_recording() -> None:
    """One CUDA graph that was recorded."""
    with _lock:
        _totals["recordings"] += 1


def count_unrecorded(reason: str) -> None:
    """One compiled graph, or one call of it, that ran without a CUDA graph where one was asked for, and why."""
    LOG.info("not recorded as a CUDA graph: %s", reason)
    with _lock:
        _unrecorded[reason] += 1


def snapshot() -> dict[str, Any]:
    """Counts since `reset`.

    graphs, kernels, cache_hits, arena_bytes (of the largest graph), recordings (CUDA graphs); `externs` calls by operator; `reasons` why
    each is not native ("op: reason" → count); `fallbacks` whole graphs by reason; `retries` configurations of kernels that did not compile or
    fit, and kernels that work on copies, by reason;
    `tuned` kernels that `max_autotune` was asked for: measured, stored, not measured with the reason; `dropped` configurations
    that were to be measured and do not run, by reason; `unrecorded` calls without the CUDA graph that was asked for, by reason; `seconds` by
    stage. Most frequent first.
    """
    with _lock:
        reasons = sorted(_externs.items(), key=lambda kv: (-kv[1], kv[0]))
        ordered = {
            name: dict(sorted(table.items(), key=lambda kv: (-kv[1], kv[0])))
            for name, table in (
                ("externs", _calls),
                ("fallbacks", _fallbacks),
                ("retries", _retries),
                ("tuned", _tuned),
                ("dropped", _dropped),
                ("unrecorded", _unrecorded),
                ("seconds", _seconds),
            )
        }
        totals = {name: _totals[name] for name in ("graphs", "kernels", "cache_hits", "arena_bytes", "recordings")}
    return {**totals, **ordered, "reasons": {f"{op}: {why}": n for (op, why), n in reasons}}


def reset() -> None:
    """Forget all counts."""
    with _lock:
        for table in (_externs, _fallbacks, _retries, _tuned, _dropped, _unrecorded, _totals, _calls, _seconds):
            table.clear()
