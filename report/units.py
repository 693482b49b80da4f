"""Numbers as people read them."""

from __future__ import annotations

__all__ = ["bytes_text", "count_text", "operations_text", "percent_text", "seconds_text"]

UNKNOWN = "unknown"


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    size, unit = next(((s, u) for s, u in steps if abs(value) >= s), steps[-1])
    shown = value / size
    digits = 0 if shown >= 99.95 or (size == 1 and value == int(value)) else 1 if shown >= 9.95 else 2
    return f"{shown:.{digits}f} {unit}"


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return _scaled(seconds * 1e9, ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1, "ns"))) if seconds else "0 s"


def bytes_text(n: float | None) -> str:
    if n is None:
        return UNKNOWN
    return _scaled(n, ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))


def operations_text(n: float | None) -> str:
    if n is None:
        return UNKNOWN
    return _scaled(n, ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))).strip()


def percent_text(part: float | None) -> str:
    if part is None:
        return UNKNOWN
    if 0 < part < 0.0005:
        return "< 0.1 %"
    return f"{100 * part:.0f} %" if part >= 0.0995 or part == 0 else f"{100 * part:.1f} %"


def count_text(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what[:-1]}ies" if what.endswith("ry") else f"{n} {what}s"
