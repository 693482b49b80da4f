"""How much memory torch's CPU allocator hands out at most: every allocation and release is counted, so the number is exact and repeatable."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

#: A size that nothing else allocates: such an allocation marks a place in the sequence of events.
MARK = 1234577


def allocation_peak(step: Callable[[], Any], warm: int = 2, kept: Iterable[torch.Tensor] = ()) -> int:
    """Bytes that one call of `step` has allocated at most at once, with what earlier calls left allocated and `kept`.

    kept  tensors that the first calls have made and that stay, such as an optimizer's state: read after `warm` calls, which compile. They are
          not profiled: where a compiler runs inside the profiler, some releases are missing from its record.
    A call more, in a thread that no earlier program has left memory for intermediate values in, shows what stays in such places. Memory that a
    kernel takes past torch's allocator does not count.
    """
    for _ in range(warm):
        step()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    with ThreadPoolExecutor(1) as thread:
        return sum(storages.values()) + thread.submit(_peak, step).result()


def _peak(step: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
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
