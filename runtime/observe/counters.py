"""Process-wide counts of what was compiled and of what was not, with the reasons: read by `stats`, `explain`, the benchmarks and the tests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock, local
from typing import Any

from ..torch_compat import dynamo_counters
from .log import LOG
from .torch_logs import note

_lock = Lock()
_trials = local()
_externs: Counter[tuple[str, str]] = Counter()
_fallbacks: Counter[str] = Counter()
_retries: Counter[str] = Counter()
_tuned: Counter[str] = Counter()
_dropped: Counter[str] = Counter()
_totals: Counter[str] = Counter()
_calls: Counter[str] = Counter()
_unrecorded: Counter[str] = Counter()
_seconds: dict[str, float] = defaultdict(float)


def count_extern(op: str, reason: str, place: str = "") -> None:
    """One node that runs by the eager kernel of `op` (`namespace.name.overload`), and why. `place`: the program's line, where another call of it
    might be compiled, which is a hint to the user.
    """
    if getattr(_trials, "depth", 0):
        return
    if place:
        note("perf_hints", f"{op} runs by its eager kernel: {reason}, in {place}")
    with _lock:
        _externs[op, reason] += 1
    _add("opforge_eager_kernels", f"{op}: {reason}")


@contextmanager
def uncounted() -> Iterator[None]:
    """What is lowered inside, in this thread, is a trial: its eager kernels are not counted."""
    _trials.depth = getattr(_trials, "depth", 0) + 1
    try:
        yield
    finally:
        _trials.depth -= 1


def count_fallback(reason: str) -> None:
    """One whole graph that runs eagerly, and why."""
    LOG.info("a graph runs eagerly: %s", reason)
    note("perf_hints", f"a whole graph runs eagerly: {reason}")
    with _lock:
        _fallbacks[reason] += 1
    _add("opforge_eager_graphs", reason)


def count_retry(reason: str) -> None:
    """One configuration of a kernel that does not compile or does not fit, and why; the next one is tried, and after the last the graph runs
    eagerly. Or a kernel that works on copies, since it has no binary for odd addresses.
    """
    LOG.info("a configuration of a kernel is left out: %s", reason)
    note("perf_hints", f"a configuration of a kernel is left out: {reason}")
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
        "%s: %d kernel%s, eager kernels: %s, arena %d bytes, %.2f s%s",
        "a graph" if graphs else "a backward",
        kernels,
        "" if kernels == 1 else "s",
        ", ".join(f"{count} {name}" for name, count in externs.items()) or "none",
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
    _add("opforge", "graphs", graphs)
    _add("opforge", "kernels", kernels)
    _add("opforge", "extern_calls", sum(externs.values()))
    _add("opforge", "cache_hits" if cached else "cache_misses", graphs)


def count_recording(title: str) -> None:
    """One CUDA graph that was recorded, of the graph with that title."""
    note("cudagraphs", f"{title} is recorded")
    with _lock:
        _totals["recordings"] += 1
    _add("opforge", "recordings")


def count_capture() -> None:
    """Count a backward that compiled autograd captured, where Dynamo's counters have it."""
    if (counts := dynamo_counters()) is not None:
        counts["compiled_autograd"]["captures"] += 1


def count_unrecorded(reason: str) -> None:
    """One compiled graph, or one call of it, that ran without a CUDA graph where one was asked for, and why."""
    LOG.info("not recorded as a CUDA graph: %s", reason)
    for switch in ("cudagraphs", "perf_hints"):
        note(switch, f"not recorded as a CUDA graph: {reason}")
    with _lock:
        _unrecorded[reason] += 1
    _add("opforge_unrecorded", reason)


def _add(table: str, name: str, more: int = 1) -> None:
    """Also to torch's own counts, `torch._dynamo.utils.counters`, which its tools print and users reset."""
    if more and (counts := dynamo_counters()) is not None:
        counts[table][name] += more


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
