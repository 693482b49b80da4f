"""What this machine can do at best, measured: how long a copy of so many bytes takes, and how fast a product of matrices is."""

from __future__ import annotations

import bisect
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Ceilings", "ceilings", "seconds_of"]

SIZES = {
    "cpu": (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24, 1 << 27),
    "cuda": (1 << 12, 1 << 18, 1 << 22, 1 << 25, 1 << 28, 1 << 30),
}
AHEAD, LAUNCHES = 128 << 20, 8  # bytes that a GPU writes before a sample; calls of one
SIDE = {"cpu": 512, "cuda": 4096}  # of the matrices


@dataclass(frozen=True)
class Ceilings:
    """copies: (bytes read and written, seconds), ascending. operations: additions and multiplications a second of a float32 product in full
    precision, which is what scalar arithmetic can reach too.
    """

    device: str
    copies: tuple[tuple[int, float], ...]
    operations: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the largest copy: that of memory."""
        size, seconds = self.copies[-1]
        return size / seconds

    @property
    def best(self) -> float:
        """Bytes a second of the fastest copy: on a processor that of its caches."""
        return max(size / seconds for size, seconds in self.copies)

    def copy_seconds(self, moved: float) -> float:
        """How long a copy takes that reads and writes so many bytes in all; below the smallest one that was measured, as long as that one."""
        sizes = [n for n, _ in self.copies]
        k = bisect.bisect(sizes, moved)
        if k == 0:
            return self.copies[0][1]
        if k == len(sizes):
            return moved / self.bandwidth
        (a, s), (b, t) = self.copies[k - 1], self.copies[k]
        part = math.log(moved / a) / math.log(b / a)
        return s * (max(t, s) / s) ** part

    def rate(self, product: str) -> float:
        """Operations a second: of scalar arithmetic with "", else of products of matrices of that dtype."""
        return product_rate(self.device, product) if product else self.operations

    def seconds(self, moved: float | None, operations: float | None, product: str = "") -> float | None:
        """The roofline: a step takes no less than a copy of its bytes, nor than its operations at the peak rate."""
        if moved is None:
            return None
        return max(self.copy_seconds(moved), (operations or 0) / self.rate(product))


@functools.cache
def ceilings(device: str) -> Ceilings:
    """Of "cpu" or "cuda:0". Takes about a second, once for each process."""
    kind = torch.device(device).type
    with torch.no_grad():
        copies = []
        for size in SIZES[kind]:
            source = torch.zeros(size // 2, dtype=torch.uint8, device=device)
            target = torch.zeros_like(source)
            copies.append((size, seconds_of(lambda source=source, target=target: target.copy_(source), device)))  # type: ignore[misc]
        # What more bytes take bounds what fewer take, where a measurement was disturbed.
        for k in range(len(copies) - 2, -1, -1):
            copies[k] = (copies[k][0], min(copies[k][1], copies[k + 1][1]))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        rate = _product(device, torch.float32)
    finally:
        torch.set_float32_matmul_precision(precision)
    return Ceilings(device, tuple(copies), rate)


@functools.cache
def product_rate(device: str, dtype: str) -> float:
    """Operations a second of a product of matrices, in the precision that the program has set."""
    return _product(device, getattr(torch, dtype))


def _product(device: str, dtype: torch.dtype) -> float:
    side = SIDE[torch.device(device).type]
    with torch.no_grad():
        a, out = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
        return 2 * side**3 / seconds_of(lambda: torch.mm(a, a, out=out), device, 0.2)


def seconds_of(run: Callable[[], object], device: str, budget: float = 0.1) -> float:
    """The fastest of several calls: seconds on the device. Others may use the machine meanwhile."""
    on_gpu = torch.device(device).type == "cuda"
    run()
    ahead = torch.empty(AHEAD, dtype=torch.uint8, device=device) if on_gpu else None
    best, spent, calls = math.inf, 0.0, 0
    while calls < 10 or (spent < budget and calls < 200):
        if ahead is not None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            ahead.zero_()  # the device is busy with it while the calls are launched
            ahead.zero_()
            begin.record()
            for _ in range(LAUNCHES):
                run()
            end.record()
            end.synchronize()
            took = begin.elapsed_time(end) / 1e3 / LAUNCHES
        else:
            start = time.perf_counter()
            run()
            took = time.perf_counter() - start
        best, spent, calls = min(best, took), spent + took, calls + 1
    return best
