"""How much memory torch's CPU allocator hands out at most: every allocation and release is counted, so the number is exact and repeatable."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

#: A size that nothing else allocates: such an allocation marks a place in the sequence of events.
MARK = 1234577


def allocation_peak(step: Callable[[], Any], warm: int = 2) -> int:
    """Bytes that one call of `step` has allocated at most at once, beside what was allocated before this function was called.

    `warm` calls go before; what they left allocated (a compiled graph's workspace, an optimizer's state) counts. Memory that a kernel takes
    past torch's allocator does not. It runs in a thread of its own, which no earlier program has left memory for intermediate values in.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_peak, step, warm).result()


def _peak(step: Callable[[], Any], warm: int) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        for _ in range(warm):
            step()
        torch.empty(MARK, dtype=torch.uint8)
        step()
    sizes = [e.nbytes() for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    start = sizes.index(MARK)
    alive = sum(sizes[:start])
    peak = alive
    for size in sizes[start + 2 :]:
        alive += size
        peak = max(peak, alive)
    return peak
