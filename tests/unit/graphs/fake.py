"""A stand-in for a device that records: on the CPU."""

from __future__ import annotations

import ctypes
import random
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from opforge.runtime.torch_compat import storage_at

SEGMENT = 2048


class FakeDevice:
    """What recorders have in common: how memory is chosen, and the pools."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.pools: weakref.WeakSet[FakeMemory] = weakref.WeakSet()

    def reserved(self) -> int:
        """Bytes of pools that somebody has."""
        return sum(s.numel() for pool in self.pools for s in pool.segments)


class FakeMemory:
    """A pool: segments that are cut into blocks, and given again when the storages in them are gone.

    `used` has the size of each block that is in use, and a number that no other block has or had. What is free when the pool itself is gone
    is overwritten, as what the driver takes back.
    """

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.segments: list[Tensor] = []
        self.used: dict[int, tuple[int, int]] = {}
        self._number = 0
        device.pools.add(self)
        weakref.finalize(self, _unmap, self.segments, self.used).atexit = False

    def free(self) -> list[tuple[int, int]]:
        """Address and size of what nobody has."""
        found = []
        for segment in self.segments:
            start, end = segment.data_ptr(), segment.data_ptr() + segment.numel()
            for address, (size, _) in sorted(self.used.items()):
                if start <= address < end:
                    found.append((start, address - start))
                    start = address + size
            found.append((start, end - start))
        return [(address, size) for address, size in found if size]

    def allocate(self, size: int) -> torch.UntypedStorage:
        """A storage whose end frees it: anywhere, mostly where it fits best, as a device's allocator splits and joins."""
        whole = (size + 63) // 64 * 64
        fitting = [(n, address) for address, n in self.free() if n >= whole]
        if not fitting:
            segment = torch.full((max(whole, SEGMENT),), 77, dtype=torch.uint8)
            self.segments.append(segment)
            fitting = [(segment.numel(), segment.data_ptr())]
        _, address = self.device.random.choice([min(fitting), min(fitting), *fitting])
        self._number += 1
        self.used[address] = (whole, self._number)
        memory = (ctypes.c_char * size).from_address(address)
        weakref.finalize(memory, _free, self.used, self.segments, address).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _free(used: dict[int, tuple[int, int]], segments: list[Tensor], address: int) -> None:
    del used[address]  # the segments live as long as what is in use there


_unmapped: list[list[Tensor]] = []


def _unmap(segments: list[Tensor], used: dict[int, tuple[int, int]]) -> None:
    for segment in segments:
        start = segment.data_ptr()
        for k in range(0, segment.numel(), 64):
            if not any(a <= start + k < a + size for a, (size, _) in used.items()):
                ctypes.memset(start + k, 99, 64)
    _unmapped.append(segments)  # a test that reads there reads 99


class FakeRecorder:
    """Records on the CPU: a replay runs the function again and puts its results where the recorded ones were, and rubbish everywhere else that
    it might have written: wherever something else in its pool was not in use all the while.

    Recording writes nothing, as on a device: what the function wrote to arguments is put back, and its results are not where the recorded ones
    will be, which may be where arguments are. It knows their addresses only, and keeps no argument alive.
    """

    def __init__(self, device: FakeDevice | None = None) -> None:
        self.stream: Hashable = 0
        self.device = device or FakeDevice()
        self.recorded = self.replayed = 0
        self.error: Exception | None = None
        self.late_error: Exception | None = None

    def place(self) -> Hashable:
        return None if self.stream is None else (self.device, self.stream)

    def shares(self) -> bool:
        return True

    def memory(self) -> FakeMemory:
        return FakeMemory(self.device)

    def record(
        self, call: Callable[[list[Any]], Sequence[Any]], inputs: list[Any], memory: FakeMemory, shared: bool
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        if self.error is not None:
            raise self.error
        self.recorded += 1
        start = {number for _, number in memory.used.values()}
        given = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, Tensor)}
        there = [at_address(t) if isinstance(t, Tensor) else t for t in inputs]
        before = [t.clone() if isinstance(t, Tensor) else t for t in there]
        scratch = memory.allocate(64 * self.device.random.randrange(1, 20))
        results = list(call(inputs))
        if self.late_error is not None:
            raise self.late_error
        for t, old in zip(there, before, strict=True):
            if isinstance(t, Tensor) and not torch.equal(t, old):
                t.copy_(old)
        homes: list[Tensor | None] = []
        storages: dict[int, torch.UntypedStorage] = {}
        for k, r in enumerate(results):
            homes.append(None)
            if isinstance(r, Tensor) and r.numel() and r.untyped_storage().data_ptr() not in given:
                if (own := storages.get(r.untyped_storage()._cdata)) is None:
                    own = storages[r.untyped_storage()._cdata] = memory.allocate(r.untyped_storage().nbytes())
                results[k] = torch.empty(0, dtype=r.dtype).set_(own, r.storage_offset(), r.shape, r.stride())
                homes[k] = at_address(results[k])
        del scratch, storages
        rubbish = _outside(memory, start)

        def replay() -> None:
            self.replayed += 1
            new = [t.clone() if isinstance(t, Tensor) else t for t in call(list(there))]
            for address, size in rubbish:
                ctypes.memset(address, self.device.random.randrange(256), size)
            for home, value in zip(homes, new, strict=True):
                if home is not None:
                    once = tuple(slice(None) if step else slice(1) for step in home.stride())
                    home[once].copy_(value[once])

        return replay, results


def _outside(memory: FakeMemory, start: set[int]) -> list[tuple[int, int]]:
    """Addresses and sizes of the pool but for blocks with these numbers."""
    found = []
    for segment in memory.segments:
        address, end = segment.data_ptr(), segment.data_ptr() + segment.numel()
        for a, (size, number) in sorted(memory.used.items()):
            if number in start and address <= a < end:
                found.append((address, a - address))
                address = a + size
        found.append((address, end - address))
    return found


def at_address(t: Tensor) -> Tensor:
    """A tensor of the same elements that does not keep them alive."""
    if not t.numel():
        return t.clone()
    storage = storage_at(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes(), t.device)
    return torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride())
