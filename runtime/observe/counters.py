"""Process-wide counts of what did not become native code, with the reasons: read by `explain`, the benchmarks and the tests."""

from __future__ import annotations

from collections import Counter
from threading import Lock

_lock = Lock()
_externs: Counter[tuple[str, str]] = Counter()
_fallbacks: Counter[str] = Counter()


def count_extern(op: str, reason: str) -> None:
    """One node that runs by the eager kernel of `op` (`namespace.name.overload`), and why."""
    with _lock:
        _externs[op, reason] += 1


def count_fallback(reason: str) -> None:
    """One whole graph that runs eagerly, and why."""
    with _lock:
        _fallbacks[reason] += 1


def snapshot() -> dict[str, dict[str, int]]:
    """Counts since `reset`: `externs` by "op: reason", `fallbacks` by reason; sorted, most frequent first."""
    with _lock:
        externs = sorted(_externs.items(), key=lambda kv: (-kv[1], kv[0]))
        fallbacks = sorted(_fallbacks.items(), key=lambda kv: (-kv[1], kv[0]))
    return {"externs": {f"{op}: {why}": n for (op, why), n in externs}, "fallbacks": dict(fallbacks)}


def reset() -> None:
    """Forget all counts."""
    with _lock:
        _externs.clear()
        _fallbacks.clear()
