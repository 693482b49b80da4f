"""Counters in a device's memory, by which the programs of a kernel find out which of them is the last. Each is 0 whenever no kernel runs that uses
it: the last program sets it back.

Kernels of one stream run one after another, so a stream has one counter for all of them. What is recorded in a CUDA graph is replayed on any stream,
also while others run: a recording has counters of its own, which no other launch ever gets.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch

from ..machine import gpu_target
from ..torch_compat import cuda_stream, empty_strided_cuda
from .launch import driver

COUNTERS = 4096  # of a device: one for each recording, and for each stream
RECORDINGS = 64  # whose counters are looked up: those that may still be going on

_lock = threading.Lock()
_free: dict[int, list[int]] = {}  # addresses, by device
_memory: list[torch.Tensor] = []  # never freed: recorded graphs hold addresses in it
_of_streams: dict[tuple[int, ...], int] = {}  # by device and stream
_of_recordings: dict[tuple[int, ...], int] = {}  # by device, recording and stream


def prepare(device: int) -> None:
    """Makes a device's counters, unless it has some or somebody records a graph (their memory would be the graph's)."""
    with _lock:
        if device not in _free and not torch.cuda.is_current_stream_capturing():
            apart = apart_on(device)
            memory = torch.zeros(COUNTERS * apart, dtype=torch.int32, device=torch.device("cuda", device))
            torch.cuda.synchronize(device)  # other streams count in it too
            start = memory.data_ptr()
            _memory.append(memory)
            _free[device] = [start + 4 * apart * k for k in reversed(range(COUNTERS))]


def apart_on(device: int) -> int:
    """32-bit numbers from one counter to the next: no two lie in one sector of the memory, where kernels of two streams would wait for each other."""
    major, minor = torch.cuda.get_device_capability(device)
    return gpu_target(10 * major + minor).limits.sector // 4


def counting(run: Callable[..., None], device: int, space: int = 0) -> Callable[..., None]:
    """A function that launches a kernel as `run` does, with the address of a counter as its last argument; and behind it that of `space` bytes which
    every launch has for itself.
    """
    prepare(device)
    apart = apart_on(device)

    def launch(programs: int, *arguments: int) -> None:
        # Work of one stream runs in order: what is freed after the launch is not used again before the kernel is done.
        own = empty_strided_cuda((space,), (1,), torch.uint8) if space else None
        last = () if own is None else (own.data_ptr(),)
        address = _counter(device)
        if address:
            run(programs, *arguments, address, *last)
            return
        # None is left: one for this launch alone, set to 0 before it, on the same stream or in the same graph.
        made = empty_strided_cuda((apart,), (1,), torch.int32)
        made.zero_()
        run(programs, *arguments, made.data_ptr(), *last)

    return launch


def _counter(device: int) -> int:
    """The address of the counter for launches of now, or 0 where there is none."""
    stream = cuda_stream(device)
    if not torch.cuda.is_current_stream_capturing():
        return _of_streams.get((device, stream)) or _take(_of_streams, (device, stream), device)
    recording = device, _recording(stream), stream
    found = _of_recordings.get(recording)
    if found is None:
        found = _take(_of_recordings, recording, device)
        while len(_of_recordings) > RECORDINGS:
            with _lock:
                _of_recordings.pop(next(iter(_of_recordings)), None)
    return found


def _take(known: dict[tuple[int, ...], int], key: tuple[int, ...], device: int) -> int:
    with _lock:
        if key not in known and _free.get(device):
            known[key] = _free[device].pop()
        return known.get(key, 0)


def _recording(stream: int) -> int:
    """What the driver calls the recording that a stream takes part in: no other one ever is called so. Raises RuntimeError if it cannot say."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    ask = driver().cuStreamGetCaptureInfo_v2
    if code := ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None):
        raise RuntimeError(f"CUDA error {code} while asking for the recording that a stream takes part in")
    return number.value


__all__ = ["counting", "prepare"]
